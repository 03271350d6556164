"""From logits to tokens on the GPU: checks, and launches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..launch_sizes import cdiv, next_power_of_2
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .reference import Likeliest
from .triton_kernels import (
    LIST,
    TOGETHER,
    bit_mask_kernel,
    likeliest_kernel,
    penalize_kernel,
    sample_kernel,
    uniform_kernel,
)

_COLUMNS_AT_A_TIME = 4096
_PAIRS_PER_PROGRAM = 256
_WORDS_PER_PROGRAM = 64


def sample_tokens_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    likeliest: Tensor | None = None,
) -> Tensor:
    """See `sample_tokens`.

    Weights are float32, so where the target or a filter's limit lies within about 1e-6 of a boundary between tokens,
    another token may be drawn or kept than by the reference's float64.
    """
    _check_logits(logits, sample_kernel, FLOAT_DTYPES)
    num_rows, vocab_size = logits.shape
    doubles = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "uniforms": uniforms}
    for name, tensor in doubles.items():
        check_tensor(name, tensor, (num_rows,), (torch.float64,), logits.device)
    if likeliest is None:
        likeliest = likeliest_tokens_triton(logits, with_log_sum_exp=False).tokens
    for name, tensor in {"top_k": top_k, "likeliest": likeliest}.items():
        check_tensor(name, tensor, (num_rows,), (torch.int64,), logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        columns = _columns(vocab_size)
        num_listed = int(LIST.value) * columns // int(TOGETHER.value)
        sample_kernel[(num_rows,)](
            tokens,
            torch.empty(num_rows, num_listed, dtype=torch.float32, device=logits.device),
            logits,
            likeliest,
            temperature,
            top_k,
            top_p,
            min_p,
            uniforms,
            vocab_size,
            logits.stride(0),
            COLUMNS=columns,
            PIECES=next_power_of_2(cdiv(vocab_size, columns)),
            num_warps=16,
            # Two rows a processor.
            maxnreg=64,
        )
    return tokens


def philox_uniform_triton(seeds: Tensor, counters: Tensor) -> Tensor:
    """See `philox_uniform`; the same numbers, bit for bit."""
    check_launch("seeds", seeds, uniform_kernel)
    check_tensor("seeds", seeds, (None,), (torch.int64,), seeds.device)
    check_tensor("counters", counters, seeds.shape, (torch.int64,), seeds.device)
    uniforms = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        grid = (cdiv(len(seeds), _PAIRS_PER_PROGRAM),)
        uniform_kernel[grid](uniforms, seeds, counters, len(seeds), NUMBERS=_PAIRS_PER_PROGRAM)
    return uniforms


def likeliest_tokens_triton(logits: Tensor, with_log_sum_exp: bool) -> Likeliest:
    """See `likeliest_tokens`."""
    _check_logits(logits, likeliest_kernel, FLOAT_DTYPES)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    highest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    log_sum_exps = torch.empty_like(highest) if with_log_sum_exp else None
    if num_rows:
        likeliest_kernel[(num_rows,)](
            tokens,
            highest,
            highest if log_sum_exps is None else log_sum_exps,
            logits,
            vocab_size,
            logits.stride(0),
            HAS_LSE=with_log_sum_exp,
            COLUMNS=_columns(vocab_size),
            num_warps=16,
            **early_launch(logits.device),
        )
    return Likeliest(tokens, highest, log_sum_exps)


def penalize_triton(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See `penalize_`; logits are float32, and so are the penalties."""
    _check_logits(logits, penalize_kernel, (torch.float32,))
    check_tensor("rows", rows, (None,), (torch.int64,), logits.device)
    for name, tensor in {"tokens": tokens, "counts": counts}.items():
        check_tensor(name, tensor, rows.shape, (torch.int64,), logits.device)
    for name, tensor in {"repetition": repetition, "presence": presence, "frequency": frequency}.items():
        check_tensor(name, tensor, rows.shape, (torch.float32,), logits.device)
    if len(rows):
        penalize_kernel[(cdiv(len(rows), _PAIRS_PER_PROGRAM),)](
            logits,
            rows,
            tokens,
            counts,
            repetition,
            presence,
            frequency,
            len(rows),
            logits.stride(0),
            PAIRS=_PAIRS_PER_PROGRAM,
        )


def apply_bit_mask_triton(logits: Tensor, bit_mask: Tensor) -> None:
    """See `apply_bit_mask`."""
    _check_logits(logits, bit_mask_kernel, FLOAT_DTYPES)
    num_rows, vocab_size = logits.shape
    num_words = cdiv(vocab_size, 32)
    check_tensor("bit_mask", bit_mask, (num_rows, num_words), (torch.int32,), logits.device)
    if num_rows:
        grid = (num_rows, cdiv(num_words, _WORDS_PER_PROGRAM))
        bit_mask_kernel[grid](
            logits, bit_mask, vocab_size, logits.stride(0), bit_mask.stride(0), WORDS=_WORDS_PER_PROGRAM, num_warps=4
        )


def _check_logits(logits: Tensor, kernel: Any, dtypes: Sequence[torch.dtype]) -> None:
    check_launch("logits", logits, kernel)
    check_tensor("logits", logits, (None, None), dtypes, logits.device, is_contiguous=False)
    if not logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} must have a column for each token of a vocabulary")


def _columns(vocab_size: int) -> int:
    return max(int(TOGETHER.value), min(_COLUMNS_AT_A_TIME, next_power_of_2(vocab_size)))

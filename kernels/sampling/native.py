"""The compiled kernels: bfloat16 or float32 logits on a CPU."""

import torch
from torch import Tensor

from ..native import native_kernel
from .reference import Likeliest


def likeliest_tokens_native(logits: Tensor, with_log_sum_exp: bool) -> Likeliest:
    """See `likeliest_tokens`; a row's elements are next to each other. Reads the logits once and widens no copy."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    maxima = torch.empty(num_rows)
    log_sum_exps = torch.empty(num_rows) if with_log_sum_exp else None
    native_kernel("argmax", logits.dtype)(
        logits.data_ptr(),
        logits.stride(0),
        tokens.data_ptr(),
        maxima.data_ptr(),
        log_sum_exps.data_ptr() if log_sum_exps is not None else None,
        num_rows,
        vocab_size,
    )
    return Likeliest(tokens, maxima, log_sum_exps)


def sample_tokens_native(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """See `sample_tokens`; a row's elements are next to each other. Computes in float32, sums in float64."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    columns = [temperature.double(), top_k, top_p.double(), min_p.double(), uniforms.double()]
    columns = [column.contiguous() for column in columns]
    native_kernel("draw", logits.dtype)(
        logits.data_ptr(),
        logits.stride(0),
        *(column.data_ptr() for column in columns),
        tokens.data_ptr(),
        num_rows,
        vocab_size,
    )
    return tokens


def token_ranks_native(logits: Tensor, tokens: Tensor) -> Tensor:
    """See `token_ranks`; a row's elements are next to each other."""
    num_rows, vocab_size = logits.shape
    ranks = torch.empty(num_rows, dtype=torch.int64)
    native_kernel("rank", logits.dtype)(
        logits.data_ptr(), logits.stride(0), tokens.contiguous().data_ptr(), ranks.data_ptr(), num_rows, vocab_size
    )
    return ranks


def apply_bit_mask_native(logits: Tensor, bit_mask: Tensor) -> None:
    """See `apply_bit_mask`; float32 logits, a row's elements next to each other. Writes only what is not allowed."""
    num_rows, vocab_size = logits.shape
    native_kernel("apply_bit_mask", logits.dtype)(
        logits.data_ptr(),
        logits.stride(0),
        bit_mask.contiguous().data_ptr(),
        bit_mask.shape[1],
        num_rows,
        vocab_size,
    )

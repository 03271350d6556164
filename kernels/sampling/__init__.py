"""From logits to tokens, repeatable by seed and counter."""

from torch import Tensor

from ..device import runs_triton
from ..native import runs_native
from .bit_mask import apply_bit_mask
from .cpu import sample_tokens_cpu
from .native import likeliest_tokens_native, sample_tokens_native, token_ranks_native
from .penalties import penalize_
from .philox import philox_uniform
from .reference import Likeliest, likeliest_tokens_reference, sample_tokens_reference, token_ranks_reference


def likeliest_tokens(logits: Tensor, with_log_sum_exp: bool = False) -> Likeliest:
    """Each row's token with the largest logit, of equals the first, and what its log-probability needs.

    logits: [n, vocab] float32 or bfloat16. A token's log-probability is its logit less the row's log-sum-exp.
    """
    if runs_native(logits):
        return likeliest_tokens_native(logits, with_log_sum_exp)
    if runs_triton(logits):
        from .triton import likeliest_tokens_triton

        return likeliest_tokens_triton(logits, with_log_sum_exp)
    return likeliest_tokens_reference(logits, with_log_sum_exp)


def token_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens of each row are at least as likely as its token in `tokens` ([n] int64), itself included.

    logits: [n, vocab] of any float type. Returns [n] int64.
    """
    if runs_native(logits):
        return token_ranks_native(logits, tokens)
    return token_ranks_reference(logits, tokens)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    likeliest: Tensor | None = None,
) -> Tensor:
    """One token a row, by inverting the cumulative distribution over the kept tokens at the row's uniform number.

    logits: [n, vocab] of any float type. temperature (> 0), top_p, min_p: [n] float64; top_k: [n] int64, 0 keeps all;
    uniforms: [n] float64 in (0, 1). Top-k keeps the k likeliest tokens; top-p those of them before which less than
    that share of their mass lies; min-p those at least that likely beside the likeliest. Of equally likely tokens all
    or none are kept, so which of them comes first in a sort makes no difference. likeliest: [n] int64, what
    `likeliest_tokens` gives of these logits, where that is known already: a GPU then reads them once less. Returns [n]
    int64.
    """
    if runs_triton(logits):
        from .triton import sample_tokens_triton

        return sample_tokens_triton(logits, temperature, top_k, top_p, min_p, uniforms, likeliest)
    if runs_native(logits):
        return sample_tokens_native(logits, temperature, top_k, top_p, min_p, uniforms)
    draw = sample_tokens_cpu if logits.device.type == "cpu" else sample_tokens_reference
    return draw(logits, temperature, top_k, top_p, min_p, uniforms)


__all__ = [
    "Likeliest",
    "apply_bit_mask",
    "likeliest_tokens",
    "penalize_",
    "philox_uniform",
    "sample_tokens",
    "token_ranks",
]

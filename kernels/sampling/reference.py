"""The obvious torch; also the path that runs where no faster one exists."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Likeliest:
    """Each row's likeliest token [n] int64, its logit [n] float32, and unless not wanted the rows' log-sum-exps [n].

    A row that has a NaN has a NaN for its logit, and for its token any of the vocabulary's. So a row has no NaN, no
    positive infinity and a token that is not masked by a negative one where its logit is finite.
    """

    tokens: Tensor
    logits: Tensor
    log_sum_exps: Tensor | None


def likeliest_tokens_reference(logits: Tensor, with_log_sum_exp: bool) -> Likeliest:
    """See `likeliest_tokens`."""
    log_sum_exps = logits.float().logsumexp(-1) if with_log_sum_exp else None
    return Likeliest(logits.argmax(-1), logits.amax(-1).float(), log_sum_exps)


def token_ranks_reference(logits: Tensor, tokens: Tensor) -> Tensor:
    """See `token_ranks`."""
    return (logits >= logits.gather(1, tokens.unsqueeze(1))).sum(-1)


def sample_tokens_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """See `sample_tokens`."""
    probs = (logits.double() / temperature.double().unsqueeze(1)).softmax(-1)
    ranked = probs.sort(dim=-1, descending=True).values
    is_kept = torch.arange(probs.shape[1], device=probs.device) < torch.where(top_k > 0, top_k, probs.shape[1])[:, None]
    mass = (ranked * is_kept).cumsum(-1)
    is_kept &= mass - ranked < top_p.double().unsqueeze(1) * mass[:, -1:]
    least = (
        ranked.masked_fill(~is_kept, 1.0).amin(-1, keepdim=True).maximum(min_p.double().unsqueeze(1) * ranked[:, :1])
    )
    cumulative = (probs * (probs >= least)).cumsum(-1)
    picked = torch.searchsorted(cumulative, uniforms.unsqueeze(1) * cumulative[:, -1:])
    return picked.squeeze(1)


def penalized(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits less likely for tokens that were there before.

    logits: [n, vocab] float; prompt_counts, output_counts: [n, vocab], how often each token is in the row's prompt
    and output; repetition, presence, frequency: [n] float. Returns [n, vocab].
    """
    repetition, presence, frequency = (penalty.unsqueeze(1) for penalty in (repetition, presence, frequency))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    result = torch.where(prompt_counts + output_counts > 0, repeated, logits)
    return result - frequency * output_counts - presence * (output_counts > 0)

"""The obvious torch; also the path that runs where no faster one exists."""

import torch
from torch import Tensor


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """One token a row, by inverting the cumulative distribution at the row's uniform number.

    logits: [n, vocab]. temperature (> 0), top_p, min_p: [n] float; top_k: [n] int64, 0 keeps all; uniforms: [n]
    float64 in (0, 1). Filters apply in the order temperature, top-k, top-p (over what top-k left), min-p
    (against the most likely token). Returns [n] int64.
    """
    scaled = logits.double() / temperature.double().unsqueeze(1)
    probs, tokens = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[1]).unsqueeze(1)
    probs = probs.masked_fill(ranks >= limit, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    mass_before = probs.cumsum(-1) - probs
    keep = (mass_before < top_p.double().unsqueeze(1)) & (probs >= min_p.double().unsqueeze(1) * probs[:, :1])
    kept = probs * keep
    cumulative = kept.cumsum(-1)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, targets).clamp(max=probs.shape[1] - 1)
    return tokens.gather(1, picked).squeeze(1)


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

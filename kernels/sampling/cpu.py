"""Drawing tokens with torch on a CPU, unsorted: the likeliest few nearly always settle what is kept."""

import numpy
import torch
from torch import Tensor
from torch.nn.functional import threshold

# Rows worked on at a time: their probabilities stay in the cache between one pass and the next.
_SLICE_ROWS = 16
# Of a row whose nucleus is wider than this, all probabilities are sorted.
_HEAD = 256
# Up to here it is quicker to find the k likeliest than to sort all.
_LONGEST_HEAD = 2048
# Tokens whose probabilities are summed up before the one that was drawn is looked for among them.
_BLOCK = 128
# Below this every other token's probability is zero in float32 anyway.
_LEAST_TEMPERATURE = 1e-20
# Above zero, and below every float32 that is.
_LEAST_SHARE = 1e-50


def sample_tokens_cpu(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """See `sample_tokens`. Computes in float32, sums in float64."""
    is_ranked = (top_k > 0) | (top_p < 1)
    result = torch.empty(len(logits), dtype=torch.int64)
    for ranked in (False, True):
        members = (is_ranked == ranked).nonzero().squeeze(1)
        for rows in torch.split(members, _SLICE_ROWS) if len(members) else ():
            probs = _probabilities(logits[rows], temperature[rows])
            least = min_p[rows] * probs.amax(-1).double()
            if ranked:
                least = torch.maximum(least, _least_of_likeliest(probs, top_k[rows], top_p[rows]))
            _drop_below(probs, least)
            result[rows] = _invert(probs, uniforms[rows])
    return result


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    logits = logits.float()
    logits -= logits.amax(-1, keepdim=True)
    return logits.div_(temperature.clamp(min=_LEAST_TEMPERATURE).float().unsqueeze(1)).softmax(-1)


def _least_of_likeliest(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability in each row that top-k and top-p keep: [n] float64."""
    vocab_size = probs.shape[1]
    limits = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    longest = int(torch.where(top_k > 0, limits, min(_HEAD, vocab_size)).max())
    head = probs.topk(longest).values if longest <= _LONGEST_HEAD else _sorted(probs)
    least, is_settled = _least_in_head(head, limits, top_p, vocab_size)
    if not is_settled.all():
        open_ = ~is_settled
        least[open_], _ = _least_in_head(_sorted(probs[open_]), limits[open_], top_p[open_], vocab_size)
    return least


def _least_in_head(head: Tensor, limits: Tensor, top_p: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The smallest probability kept among the likeliest ([n, k], falling), and whether less likely ones are not."""
    length = head.shape[1]
    ranks = torch.arange(length)
    mass = torch.where(ranks < limits.unsqueeze(1), head.double(), 0.0).cumsum(-1)
    # Without top-k the whole vocabulary counts, and it sums to one.
    whole = torch.where(limits < vocab_size, mass[:, -1], 1.0)
    mass_before = torch.cat([torch.zeros(len(head), 1, dtype=torch.float64), mass[:, :-1]], 1)
    num_kept = torch.minimum((mass_before < (top_p * whole).unsqueeze(1)).sum(-1), limits)
    # Of a row with a NaN nothing is kept; whatever is drawn from it is not used.
    least = head.gather(1, num_kept.unsqueeze(1).clamp(min=1) - 1).squeeze(1).double()
    return least, (num_kept < length) | (limits <= length)


def _sorted(probs: Tensor) -> Tensor:
    """From the largest down. numpy's sort of plain values is several times faster than torch's."""
    return torch.from_numpy(numpy.sort(probs.numpy(), axis=-1)).flip(-1)


def _drop_below(probs: Tensor, least: Tensor) -> None:
    """Zero what is less likely than a row's `least`, in place."""
    # What `threshold` compares with is not kept itself: the next smaller number.
    below = torch.nextafter(least.float(), torch.tensor(-1.0))
    for row, bound in zip(probs, below.tolist(), strict=True):
        # One pass; comparing and masking all rows at once takes ten times as long.
        if bound > 0:
            threshold(row, bound, 0.0, inplace=True)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The tokens, in the order of their ids, up to which the weights make up these shares of each row's sum."""
    num_rows, vocab_size = weights.shape
    whole = vocab_size // _BLOCK * _BLOCK
    blocks = weights[:, :whole].view(num_rows, whole // _BLOCK, _BLOCK)
    sums = torch.cat([blocks.sum(-1), weights[:, whole:].sum(-1, keepdim=True)], 1).double()
    ends = sums.cumsum(-1)
    targets = uniforms.unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, targets).clamp(max=sums.shape[1] - 1)
    places = block * _BLOCK + torch.arange(_BLOCK)
    is_token = places < vocab_size
    within = (weights.gather(1, places.clamp(max=vocab_size - 1)).double() * is_token).cumsum(-1)
    # Rounding must not carry it beyond the block's last token that has a weight.
    rest = torch.minimum(targets - (ends.gather(1, block) - sums.gather(1, block)), within[:, -1:])
    # Nor down to a first token that has none.
    rest = rest.clamp(min=_LEAST_SHARE)
    return places.gather(1, torch.searchsorted(within, rest).clamp(max=_BLOCK - 1)).squeeze(1)

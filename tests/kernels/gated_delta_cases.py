"""What Gated DeltaNet's kernels are called with in tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.recurrent_states import StateSlots

from .state_cases import slots_of, states_of

# Key heads, heads, key_dim, value_dim.
SHAPES = {"h1of1": (1, 1, 32, 16), "h2of4-odd": (2, 4, 24, 40), "h1of4": (1, 4, 16, 32)}


@dataclass(frozen=True)
class RuleCase:
    """mixed, decay and beta are parts of wider matrices."""

    mixed: Tensor
    decay: Tensor
    beta: Tensor
    decay_scale: Tensor
    decay_bias: Tensor
    states: Tensor
    slots: StateSlots
    doubles_beta: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """`states` is a copy."""
        return vars(replace(self, states=self.states.clone()))


def hard_rule_case(kind: str, dtype: torch.dtype, device: torch.device) -> RuleCase:
    """alike: all keys are nearly the same and every token overwrites what the last one wrote; nothing is forgotten.

    Powers of such a triangular system have numbers of 17 digits, its inverse none above 1. forgetful: hardly anything
    is left from one token to the next, so that nothing is left of a number that is divided by what is left.
    """
    case = rule_case((70,), SHAPES["h1of1"], dtype, device)
    keys, values = case.mixed[:, 32:64], case.mixed[:, 64:]
    values.mul_(0.5)
    if kind == "alike":
        keys.copy_(keys[:1] + keys / 64)
        case.decay.fill_(-20.0)
        case.beta.fill_(6.0)
    else:
        case.decay.mul_(4).add_(20.0)
    return case


def zero_rule_case(device: torch.device) -> RuleCase:
    """Of three tokens in two sequences, one key head and two heads of 16."""
    mixed, states = torch.zeros(3, 64, device=device), torch.zeros(3, 2, 16, 16, device=device)
    (decay, beta), (scale, bias) = torch.zeros(2, 3, 2, device=device), torch.zeros(2, 2, device=device)
    return RuleCase(mixed, decay, beta, scale, bias, states, StateSlots((1, 2), (0, 0), (1, 2), device))


def rule_case(
    query_lens: Sequence[int], shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> RuleCase:
    """From decays of many sizes, outputs that are large for the dtype's tolerance, and sums that are not too large.

    Of several key heads it doubles beta.
    """
    num_key_heads, num_heads, key_dim, value_dim = shape
    key_size, num_tokens = num_key_heads * key_dim, sum(query_lens)
    mixed = torch.randn(num_tokens, 2 * key_size + num_heads * value_dim + 3)
    mixed[:, 2 * key_size :] *= 0.5 if dtype == torch.float32 else key_dim**0.5 / 2
    mixed = mixed.to(device, dtype)[:, :-3]
    decay, beta = torch.randn(num_tokens, 2 * num_heads + 1).to(device, dtype)[:, :-1].chunk(2, dim=1)
    decay_scale, decay_bias = torch.rand(num_heads, device=device) * 4 - 3, torch.randn(num_heads, device=device)
    slots = slots_of(query_lens, device)
    states = states_of(slots, num_heads, key_dim, value_dim)
    return RuleCase(mixed, decay, beta, decay_scale, decay_bias, states, slots, doubles_beta=num_key_heads > 1)


def in_two_parts(rule: Callable[..., Tensor], whole: RuleCase, cut: int) -> tuple[Tensor, Tensor]:
    """The outputs of the only sequence's tokens, up to `cut` in one call and from there in another, and its state.

    The first part is left in a slot of its own, as a prefix that others will go on from.
    """
    states = whole.states.repeat(2, 1, 1, 1)
    states[2:] = torch.nan
    outputs = []
    for places, read, write in ((slice(0, cut), 0, 2), (slice(cut, None), 2, 3)):
        mixed, decay, beta = whole.mixed[places], whole.decay[places], whole.beta[places]
        slots = StateSlots((len(mixed),), (read,), (write,), mixed.device)
        part = replace(whole, mixed=mixed, decay=decay, beta=beta, states=states, slots=slots)
        outputs.append(rule(**vars(part)))
    return torch.cat(outputs), states[3]

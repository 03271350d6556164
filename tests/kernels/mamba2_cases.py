"""What Mamba-2's kernels are called with in tests."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.recurrent_states import StateSlots

from .state_cases import slots_of, states_of

# Groups, heads, state_dim, head_dim.
SHAPES = {"g1of1": (1, 1, 32, 16), "g2of4-odd": (2, 4, 24, 40), "g1of4": (1, 4, 16, 32)}


@dataclass(frozen=True)
class ScanCase:
    """mixed and dt are parts of wider matrices."""

    mixed: Tensor
    dt: Tensor
    decay_scale: Tensor
    dt_bias: Tensor
    skip: Tensor
    states: Tensor
    slots: StateSlots
    dt_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def arguments(self) -> dict[str, Any]:
        """`states` is a copy."""
        return vars(replace(self, states=self.states.clone()))


def scan_case(
    query_lens: Sequence[int], shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> ScanCase:
    """Of decays of many sizes; the sums are not too large."""
    num_groups, num_heads, state_dim, head_dim = shape
    num_tokens, size = sum(query_lens), num_groups * state_dim
    mixed = torch.randn(num_tokens, num_heads * head_dim + 2 * size + 8)
    mixed[:, num_heads * head_dim :] *= state_dim**-0.5 if dtype == torch.float32 else state_dim**-0.25
    mixed[:, : num_heads * head_dim] *= 0.25 if dtype == torch.float32 else 1.0
    mixed = mixed.to(device, dtype)[:, :-8]
    dt = torch.randn(num_tokens, num_heads + 3).to(device, dtype)[:, :-3]
    decay_scale, (dt_bias, skip) = torch.rand(num_heads) * 3 - 3, torch.randn(2, num_heads)
    slots = slots_of(query_lens, device)
    states = states_of(slots, num_heads, state_dim, head_dim)
    return ScanCase(mixed, dt, decay_scale.to(device), dt_bias.to(device), skip.to(device), states, slots)


def hard_scan_case(kind: str, dtype: torch.dtype, device: torch.device) -> ScanCase:
    """forgetful: nothing is left from one token to the next; a number divided by what is left would be lost.

    keeping: nothing is forgotten, and little written. limited: most steps are held by a limit.
    """
    case = scan_case((70, 1), SHAPES["g1of1"], dtype, device)
    if kind == "limited":
        return replace(case, dt_limits=(0.5, 0.75))
    case.dt.fill_(20.0 if kind == "forgetful" else -20.0)
    case.mixed.mul_(0.25 if kind == "forgetful" else 1.0)
    return replace(case, decay_scale=torch.full_like(case.decay_scale, 2.0), dt_bias=case.dt_bias * 0.1)


def zero_scan_case(device: torch.device) -> ScanCase:
    """Of three tokens in two sequences, one group and two heads of 16."""
    mixed, states = torch.zeros(3, 64, device=device), torch.zeros(3, 2, 16, 16, device=device)
    dt, (scale, bias, skip) = torch.zeros(3, 2, device=device), torch.zeros(3, 2, device=device)
    return ScanCase(mixed, dt, scale, bias, skip, states, StateSlots((1, 2), (0, 0), (1, 2), device))


def in_two_parts(scan: Callable[..., Tensor], whole: ScanCase, cut: int) -> tuple[Tensor, Tensor]:
    """The outputs of the only sequence's tokens, up to `cut` in one call and from there in another, and its state.

    The first part is left in a slot of its own, as a prefix that others will go on from.
    """
    states = whole.states.repeat(2, 1, 1, 1)
    states[2:] = torch.nan
    outputs = []
    for part, read, write in ((slice(0, cut), 0, 2), (slice(cut, None), 2, 3)):
        mixed, dt = whole.mixed[part], whole.dt[part]
        slots = StateSlots((len(mixed),), (read,), (write,), mixed.device)
        outputs.append(scan(**vars(replace(whole, mixed=mixed, dt=dt, states=states, slots=slots))))
    return torch.cat(outputs), states[3]

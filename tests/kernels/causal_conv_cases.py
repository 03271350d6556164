"""What short convolutions are called with in tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.recurrent_states import StateSlots

from .state_cases import slots_of, states_of

# With SiLU alone, with a bias before it, with neither.
KINDS = ["silu", "biased", "plain"]


@dataclass(frozen=True)
class ConvCase:
    """x is a part of a wider matrix."""

    x: Tensor
    weight: Tensor
    states: Tensor
    slots: StateSlots
    bias: Tensor | None = None
    silu: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        """`states` is a copy."""
        return vars(replace(self, states=self.states.clone()))


def zero_conv_case(device: torch.device) -> ConvCase:
    """Of three tokens in two sequences, five channels and a width of four."""
    x, weight, states = (torch.zeros(shape, device=device) for shape in ((3, 5), (5, 4), (3, 3, 5)))
    return ConvCase(x, weight, states, StateSlots((1, 2), (0, 0), (1, 2), device))


def conv_case(
    query_lens: Sequence[int],
    num_channels: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: str = "silu",
) -> ConvCase:
    """kind: of Gated DeltaNet's, of Mamba-2's, or of LFM2's."""
    # Where channels are a multiple of eight they may be read eight at a time, and so are by other threads.
    beside = 8 if num_channels % 8 == 0 else 3
    x = torch.randn(sum(query_lens), num_channels + beside).to(device, dtype)[:, :-beside]
    weight = torch.randn(num_channels, width).to(device, dtype)
    slots = slots_of(query_lens, device)
    bias = torch.randn(num_channels).to(device, dtype) if kind == "biased" else None
    states = states_of(slots, width - 1, num_channels).to(dtype)
    return ConvCase(x, weight, states, slots, bias, silu=kind != "plain")

"""Short convolutions over a sequence's latest tokens, of layers that keep a state."""

from torch import Tensor

from ..device import runs_triton
from ..recurrent_states import StateSlots
from .chunked import causal_conv_chunked
from .native import causal_conv_native, takes_native_conv


def causal_conv(
    x: Tensor, weight: Tensor, states: Tensor, slots: StateSlots, *, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """Each channel convolved over its sequence's latest tokens, with `silu` then SiLU.

    x: [num_tokens, num_channels], the sequences one after the other as `slots` says, its rows evenly apart. weight:
    [num_channels, width], the last column for the token itself. states: [num_slots, width - 1, num_channels], the
    inputs before a sequence's first token, oldest first; those that `slots` writes are changed in place. bias:
    [num_channels], added before SiLU. All of one dtype. Returns [num_tokens, num_channels], contiguous. Raises
    `ValueError` naming the argument that does not fit.
    """
    _check_conv(x, weight, states, slots, bias)
    if takes_native_conv(x, weight, states, bias):
        return causal_conv_native(x, weight, states, slots, bias=bias, silu=silu)
    if runs_triton(x):
        from .triton import causal_conv_triton

        return causal_conv_triton(x, weight, states, slots, bias=bias, silu=silu)
    return causal_conv_chunked(x, weight, states, slots, bias=bias, silu=silu)


def _check_conv(x: Tensor, weight: Tensor, states: Tensor, slots: StateSlots, bias: Tensor | None) -> None:
    if x.ndim != 2 or len(x) != slots.num_tokens:
        raise ValueError(f"x {tuple(x.shape)} must be [{slots.num_tokens} tokens, num_channels]")
    if weight.ndim != 2 or len(weight) != x.shape[1] or weight.shape[1] < 2:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be [{x.shape[1]} channels, width], of a width of 2 or more"
        )
    if states.ndim != 3 or states.shape[1:] != (weight.shape[1] - 1, x.shape[1]):
        wanted = f"[num_slots, {weight.shape[1] - 1}, {x.shape[1]} channels]"
        raise ValueError(f"states {tuple(states.shape)} must be {wanted}")
    if bias is not None and bias.shape != (x.shape[1],):
        raise ValueError(f"bias {tuple(bias.shape)} must be [{x.shape[1]} channels]")
    for name, tensor in (("weight", weight), ("states", states), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, and x {x.dtype}: they must be alike")


__all__ = ["causal_conv"]

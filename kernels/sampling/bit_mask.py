"""Tokens that a grammar allows, a bit each."""

import numpy
import torch
from torch import Tensor

from ..device import runs_triton
from ..native import runs_native
from .native import apply_bit_mask_native


def apply_bit_mask(logits: Tensor, bit_mask: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity, in place.

    logits: [n, vocab] of any float type. bit_mask: [n, ceil(vocab / 32)] int32; token t's bit is number t % 32, from
    the lowest, of word t // 32, as llguidance and XGrammar have it.
    """
    if runs_triton(logits):
        from .triton import apply_bit_mask_triton

        apply_bit_mask_triton(logits, bit_mask)
    elif logits.dtype == torch.float32 and runs_native(logits):
        apply_bit_mask_native(logits, bit_mask)
    elif logits.device.type == "cpu":
        apply_bit_mask_cpu(logits, bit_mask)
    else:
        apply_bit_mask_reference(logits, bit_mask)


def apply_bit_mask_cpu(logits: Tensor, bit_mask: Tensor) -> None:
    """See `apply_bit_mask`. numpy unpacks bits to bytes; torch's shifts make 32-bit numbers of them first."""
    octets = bit_mask.contiguous().numpy().view(numpy.uint8)
    bits = numpy.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits) == 0, -torch.inf)


def apply_bit_mask_reference(logits: Tensor, bit_mask: Tensor) -> None:
    """See `apply_bit_mask`."""
    bits = (bit_mask.unsqueeze(-1) >> torch.arange(32, device=bit_mask.device)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)

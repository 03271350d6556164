"""Weights quantised and laid out as the published formats describe it, for checkpoints that tests write.

Each writer takes a weight [out, in] and gives the tensors that a checkpoint has for its module, and what they stand
for. Nothing here comes from the loader: a word is put together from its eight values one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]
FP8 = torch.float8_e4m3fn
# AutoAWQ, awq/modules/linear/gemm.py: the column that goes into the i-th four bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(columns: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """[n, m] of 0..15 to [n, m / 8] int32, filled up with zeros: the first of `order` in the lowest bits."""
    rows = []
    for row in columns.tolist():
        row += [0] * (-len(row) % 8)
        packed = []
        for start in range(0, len(row), 8):
            word = sum(row[start + place] << (4 * index) for index, place in enumerate(order))
            packed.append(word - 2**32 if word >= 2**31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


@dataclass(frozen=True)
class Quantized:
    """values: [out, in] of 0..15; scales, zeros: [out, groups]; group: [in]; weight: what it stands for."""

    values: Tensor
    scales: Tensor
    zeros: Tensor
    group: Tensor
    weight: Tensor


def quantize(weight: Tensor, group_size: int, symmetric: bool, group: Tensor | None = None) -> Quantized:
    num_inputs = weight.shape[1]
    group = torch.arange(num_inputs) // group_size if group is None else group
    columns = [weight[:, group == index] for index in range(int(group.max()) + 1)]
    if symmetric:
        scales = torch.stack([part.abs().amax(1) / 7.5 for part in columns], 1).half().float()
        zeros = torch.full_like(scales, 8)
    else:
        lowest = torch.stack([part.amin(1).clamp(max=0) for part in columns], 1)
        highest = torch.stack([part.amax(1).clamp(min=0) for part in columns], 1)
        scales = ((highest - lowest) / 15).half().float()
        zeros = (-lowest / scales).round().clamp(1, 15)
    values = (weight / scales[:, group] + zeros[:, group]).round().clamp(0, 15)
    return Quantized(values.int(), scales, zeros.int(), group, (values - zeros[:, group]) * scales[:, group])


def gptq(
    group_size: int, symmetric: bool = True, desc_act: bool = False, less_one: int = 1, with_index: bool = True
) -> Writer:
    """AutoGPTQ: inputs along the words, zeros along the outputs and one less than they are."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_inputs = weight.shape[1]
        size = num_inputs if group_size == -1 else group_size
        group = torch.arange(num_inputs) // size
        if desc_act:
            group = group[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))]
        done = quantize(weight, size, symmetric, group)
        tensors = {
            "qweight": words(done.values).t().contiguous(),
            "qzeros": words(done.zeros.t() - less_one),
            "scales": done.scales.t().half().contiguous(),
        }
        if with_index:
            tensors["g_idx"] = group.int()
        return tensors, done.weight

    return write


def awq(group_size: int) -> Writer:
    """AutoAWQ for its GEMM kernels: outputs along the words, in their order, weights and zeros alike."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        done = quantize(weight, group_size, symmetric=False)
        tensors = {
            "qweight": words(done.values.t(), AWQ_ORDER),
            "qzeros": words(done.zeros.t(), AWQ_ORDER),
            "scales": done.scales.t().half().contiguous(),
        }
        return tensors, done.weight

    return write


def packed(group_size: int | None, symmetric: bool, with_order: bool = False) -> Writer:
    """compressed-tensors' pack-quantized: signed values moved up by eight, zeros packed along the outputs."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_outputs, num_inputs = weight.shape
        size = group_size or num_inputs
        group = torch.arange(num_inputs) // size
        if with_order:
            group = group.flip(0)
        done = quantize(weight, size, symmetric, group)
        tensors = {
            "weight_packed": words(done.values),
            "weight_scale": done.scales.half(),
            "weight_shape": torch.tensor([num_outputs, num_inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(done.zeros.t()).t().contiguous()
        if with_order:
            tensors["weight_g_idx"] = group.int()
        return tensors, done.weight

    return write


def scaled(
    dtype: torch.dtype, scales: str, scale_name: str = "weight_scale", block: int = 128, **extra: Tensor
) -> Writer:
    """A byte a weight, with a scale for all ("tensor"), for each output ("channel") or for each square ("block")."""
    largest = 127 if dtype == torch.int8 else 448

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_outputs, num_inputs = weight.shape
        if scales == "tensor":
            scale = (weight.abs().max() / largest).reshape(())
            spread = scale.expand_as(weight)
        elif scales == "channel":
            scale = weight.abs().amax(1, keepdim=True) / largest
            spread = scale.expand_as(weight)
        else:
            rows, columns = range(0, num_outputs, block), range(0, num_inputs, block)
            spread, scale = torch.empty_like(weight), torch.empty(len(rows), len(columns))
            for row in rows:
                for column in columns:
                    square = (slice(row, row + block), slice(column, column + block))
                    found = weight[square].abs().max() / largest
                    scale[row // block, column // block] = spread[square] = found
        stored = (weight / spread).clamp(-largest, largest)
        stored = stored.round().to(dtype) if dtype == torch.int8 else stored.to(dtype)
        # Files hold no tensor twice.
        beside = {name: tensor.clone() for name, tensor in extra.items()}
        return {"weight": stored, scale_name: scale.clone(), **beside}, stored.float() * spread

    return write


def modelopt_fp8(scales: str) -> Writer:
    """As `scaled`, in the shapes that ModelOpt has: scales of blocks between dimensions of one."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, plain = scaled(FP8, scales, input_scale=torch.tensor(0.5))(weight)
        scale = tensors["weight_scale"]
        shape = {"tensor": (), "channel": (-1,), "block": (len(scale), 1, -1, 1) if scales == "block" else ()}[scales]
        return {**tensors, "weight_scale": scale.reshape(shape)}, plain

    return write


# What four bits of E2M1 are, the highest a sign: two of exponent, one behind the point.
FP4_VALUES = torch.tensor([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def e4m3(byte: int) -> float:
    """What a byte of E4M3 is: a sign, four bits of exponent that count from 7, three behind the point."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
    return -size if byte >> 7 else size


def nvfp4(weight_name: str = "weight", factor_name: str = "weight_scale_2", divides: bool = False) -> Writer:
    """Two values a byte, the first in the lower half; 16 have a scale in E4M3, and all a factor, or its reciprocal."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = weight.unflatten(1, (-1, 16))
        stored = 6 * 448 / weight.abs().max() if divides else weight.abs().max() / (6 * 448)
        factor = 1 / stored if divides else stored
        scales = (groups.abs().amax(2) / 6 / factor).to(FP8)
        bits = scales.view(torch.uint8)
        spread = (torch.tensor([e4m3(each) for each in bits.flatten().tolist()]).view(bits.shape) * factor).unsqueeze(2)
        values = (groups.unsqueeze(3) / spread.unsqueeze(3) - FP4_VALUES).abs().argmin(3).to(torch.uint8)
        plain = (FP4_VALUES[values.int()] * spread).flatten(1)
        values = values.flatten(1)
        tensors = {
            weight_name: values[:, ::2] + 16 * values[:, 1::2],
            "weight_scale": scales,
            factor_name: stored.clone(),
            "input_global_scale" if divides else "input_scale": torch.ones(1),
        }
        return tensors, plain

    return write

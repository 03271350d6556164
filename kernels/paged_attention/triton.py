"""Attention on the GPU: launches the kernels by a step's plan, checks what they are given."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..device import num_processors
from ..kv_cache.fp8 import FP8_LARGEST, UNSCALED, KVScales, is_fp8
from ..launch_sizes import next_power_of_2
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .attention_shape import AttentionShape
from .device_plan import DevicePlan
from .hopper import launch_hopper_kernel, takes_hopper_kernel
from .kernel_shapes import KernelShape, KernelShapes
from .latent_values import are_parts
from .metadata import AttentionMetadata
from .planning import plan_attention
from .triton_kernels import attend_kernel, merge_kernel

# What a product has to have at least to sum up.
_LEAST_PRODUCT = 16
_MERGED_HEADS, _MERGES_PER_PROCESSOR = 8, 8


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales = UNSCALED,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `paged_attention`. A prefix that sequences share is computed once for all of them, where that pays."""
    _check(query, key_cache, value_cache, metadata)
    _check_sinks(sinks, query)
    shape = _shape_of(query, key_cache, value_cache)
    plan = _plan_of(metadata, shape, sliding_window, query.device)
    output = query.new_empty(*query.shape[:2], value_cache.shape[3])
    given = query, key_cache, value_cache, plan, shape, scale, output
    _attend(*given, None, sliding_window, soft_cap, kv_scales, sinks)
    return output


def attend_planned(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: DevicePlan,
    scale: float,
    output: Tensor,
    lse: Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales = UNSCALED,
    tuned: KernelShapes | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Fill `output` (like query, with heads of the values' size) and, where given, `lse` ([num_tokens, num_heads]
    float32, the natural log-sum-exps, those of the sinks included).

    The plan's window has to be this one, and so have the shapes that it was made for, where they are `tuned`. Which
    launches there are is for the plan's `launches` to say, and their grids never depend on what it holds, so that they
    can be captured in a CUDA graph.
    """
    _check_tensors(query, key_cache, value_cache)
    outputs = (*query.shape[:2], value_cache.shape[3])
    check_tensor("output", output, outputs, (query.dtype,), query.device, is_contiguous=False)
    _check_sinks(sinks, query)
    if lse is not None:
        check_tensor("lse", lse, query.shape[:2], (torch.float32,), query.device)
    shape = replace(_shape_of(query, key_cache, value_cache), tuned=tuned)
    given = query, key_cache, value_cache, plan, shape, scale, output
    _attend(*given, lse, sliding_window, soft_cap, kv_scales, sinks)


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: DevicePlan,
    shape: AttentionShape,
    scale: float,
    output: Tensor,
    lse: Tensor | None,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: KVScales,
    sinks: Tensor | None,
) -> None:
    """As `attend_planned`, of tensors that fit together."""
    scales = kv_scales if is_fp8(key_cache) else UNSCALED
    launch = _Launch(query, key_cache, value_cache, plan, output, lse, shape, scales, sinks)
    kernels = shape.kernels(query.device, is_fp8(key_cache))
    # One after the other: with both beside each other, in a CUDA graph with branches, a step of Qwen2.5-0.5B took an
    # H200 1.79 ms, and 1.72 so.
    if "wide" in plan.launches:
        launch.attend("wide", kernels.wide, scale, sliding_window, soft_cap)
    if "narrow" in plan.launches:
        launch.attend("narrow", kernels.narrow, scale, sliding_window, soft_cap)
    if "merge_tokens" in plan.launches:
        launch.merge()


@dataclass(frozen=True)
class _Launch:
    """The kernels on one layer's tensors."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    plan: DevicePlan
    output: Tensor
    lse: Tensor | None
    shape: AttentionShape
    kv_scales: KVScales
    sinks: Tensor | None

    def attend(
        self,
        items: str,
        kernel: KernelShape,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> None:
        given = {
            **self._results(),
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "items": self.plan.section(items),
            "num_items": self.plan.section(f"num_{items}"),
            "query_tokens": self.plan.section("query_tokens"),
            "blocks": self.plan.section("blocks"),
            "scale": scale * self.kv_scales.key,
            "value_scale": self.kv_scales.value,
            "soft_cap": soft_cap or 0.0,
            "sliding_window": sliding_window or 0,
            "num_kv_heads": self.shape.num_kv_heads,
            "query_token_stride": self.query.stride(0),
            "query_head_stride": self.query.stride(1),
            "cache_block_stride": self.key_cache.stride(0),
            "cache_slot_stride": self.key_cache.stride(1),
            # Of a latent all heads see the one there is.
            "cache_head_stride": 0 if self.shape.key_rest else self.key_cache.stride(2),
            "GROUP": self.shape.group,
            "BLOCK_SIZE": self.key_cache.shape[1],
            "HAS_WINDOW": sliding_window is not None,
            "HAS_SOFT_CAP": soft_cap is not None,
            **early_launch(self.query.device),
        }
        if items == "wide" and takes_hopper_kernel(self.query, self.key_cache, self.value_cache, self.shape, kernel):
            launch_hopper_kernel(given, self.query.device)
            return
        grid = (num_processors(self.query.device) * kernel.programs_per_processor,)
        attend_kernel[grid](
            **given,
            KEY_REST=self.shape.key_rest,
            PADDED_REST=max(next_power_of_2(self.shape.key_rest), _LEAST_PRODUCT),
            ROWS=kernel.rows,
            TILE=kernel.tile,
            HAS_WHOLE=items == "wide" and sliding_window is None and self._multiplies_for_long,
            IS_PAIRED=self._reads_pairs(),
            FOLLOWS_WIDE=items == "narrow" and "wide" in self.plan.launches,
            # Exact products in float32; TF32 would cost three digits.
            PRECISION="ieee" if self.shape.dtype == torch.float32 else "tf32",
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
            maxnreg=kernel.max_registers,
        )

    @property
    def _multiplies_for_long(self) -> bool:
        """Whether a loop without masks was seen to pay where there is much to multiply."""
        return self.shape.dtype != torch.float32 and not self.shape.key_rest

    def _reads_pairs(self) -> bool:
        """Whether values are read for themselves, and best so."""
        return not self.shape.key_rest and self.shape.dtype != torch.float32 and has_pairs(self.value_cache)

    def merge(self) -> None:
        plan = self.plan
        grid = (num_processors(self.query.device) * _MERGES_PER_PROCESSOR,)
        merge_kernel[grid](
            **self._results(),
            merge_tokens=plan.section("merge_tokens"),
            merge_starts=plan.section("merge_starts"),
            merge_rows=plan.section("merge_rows"),
            num_merges=plan.section("num_merges"),
            num_heads=self.shape.num_heads,
            HEADS=min(_MERGED_HEADS, next_power_of_2(self.shape.num_heads)),
            **early_launch(self.query.device),
        )

    def _results(self) -> dict[str, Any]:
        return {
            "output": self.output,
            # Not written without HAS_LSE, but a pointer it has to be.
            "lse": self.plan.partial_lse if self.lse is None else self.lse,
            # Parts are rounded as the output is: they are read and written as often as keys where prefixes are shared.
            "partial_output": self.plan.partial_output.view(self.output.dtype),
            "partial_lse": self.plan.partial_lse,
            # As `lse`: not read without HAS_SINKS.
            "sinks": self.plan.partial_lse if self.sinks is None else self.sinks,
            "output_token_stride": self.output.stride(0),
            "output_head_stride": self.output.stride(1),
            "HEAD_DIM": self.shape.head_dim,
            "PADDED_DIM": next_power_of_2(self.shape.head_dim),
            "HAS_LSE": self.lse is not None,
            "HAS_SINKS": self.sinks is not None,
        }


def has_pairs(cache: Tensor) -> bool:
    """Whether its numbers can be read two at a time as one of 16 bits: every head begins at an even address."""
    numbers = (cache.storage_offset(), cache.shape[3], *cache.stride()[:3])
    return is_fp8(cache) and not any(number % 2 for number in numbers)


def _shape_of(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> AttentionShape:
    (_, num_heads, key_dim), (num_kv_heads, value_dim) = query.shape, value_cache.shape[2:]
    return AttentionShape.of(num_heads, num_kv_heads, key_dim, value_dim, query.dtype, query.device)


def _plan_of(
    metadata: AttentionMetadata, shape: AttentionShape, sliding_window: int | None, device: torch.device
) -> DevicePlan:
    """The step's plan for layers of this shape and window, worked out by the first of them."""
    key = (shape, sliding_window)
    if key not in metadata.device_plans:
        plan = plan_attention(metadata, shape, sliding_window)
        metadata.device_plans[key] = DevicePlan.holding(plan, shape.num_heads, shape.head_dim, device)
    return metadata.device_plans[key]


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata) -> None:
    _check_tensors(query, key_cache, value_cache, metadata.num_tokens)
    if key_cache.shape[1] != metadata.block_size:
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} must have the shape [any, {metadata.block_size}, any, any]: metadata "
            "has blocks of so many tokens"
        )


def _check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    if sinks is not None:
        check_tensor("sinks", sinks, query.shape[1:2], (torch.float32,), query.device)


def _check_tensors(query: Tensor, key_cache: Tensor, value_cache: Tensor, num_tokens: int | None = None) -> None:
    """`num_tokens`: how many the query has to have, where that is known."""
    check_launch("query", query, attend_kernel)
    check_tensor("query", query, (num_tokens, None, None), FLOAT_DTYPES, query.device, is_contiguous=False)
    head_dim = query.shape[2]
    value_dim = head_dim if key_cache.shape == value_cache.shape else value_cache.shape[-1]
    try:
        AttentionShape.of(query.shape[1], 1, head_dim, value_dim, query.dtype, query.device)
    except ValueError as error:
        raise ValueError(f"query {tuple(query.shape)} has {error}") from error
    dtypes = (query.dtype, *FP8_LARGEST)
    for name, cache, size in (("key_cache", key_cache, head_dim), ("value_cache", value_cache, value_dim)):
        check_tensor(name, cache, (None, None, None, size), dtypes, query.device, is_contiguous=False)
    if value_dim != head_dim and (key_cache.shape[2] != 1 or not are_parts(key_cache, value_cache)):
        raise ValueError(
            f"value_cache {tuple(value_cache.shape)} must be as long as key_cache {tuple(key_cache.shape)}, or the "
            "first part of its only head"
        )
    if key_cache.dtype != value_cache.dtype:
        raise ValueError(f"key_cache is {key_cache.dtype} and value_cache {value_cache.dtype}; both must be one")
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} must have one shape and "
            f"layout, and have strides {key_cache.stride()} and {value_cache.stride()}"
        )
    block_size = key_cache.shape[1]
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"key_cache {tuple(key_cache.shape)} has blocks of {block_size}; needs a power of two")
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} must have a multiple of {key_cache.shape[2]} heads, as key_cache has"
        )

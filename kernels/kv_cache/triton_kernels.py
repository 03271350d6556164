"""Copies between KV blocks on the GPU."""

import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(kv_cache, sources, destinations, num_blocks, block_numel, ELEMENTS: tl.constexpr):
    """One program is a pair of blocks, a layer's keys or values, and `ELEMENTS` of its numbers."""
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    destination = tl.load(destinations + tl.program_id(0)).to(tl.int64)
    element = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_element = element < block_numel
    layer = kv_cache + tl.program_id(1).to(tl.int64) * num_blocks * block_numel
    numbers = tl.load(layer + source * block_numel + element, mask=is_element)
    tl.store(layer + destination * block_numel + element, numbers, mask=is_element)

"""FlashInfer's decode attention on the case that `gpu.py` measures ours on, where it is installed."""

from importlib import import_module
from typing import Any

import torch
from gpu_kernels import BLOCK_SIZE, AttentionCase, Sizes, never, seconds
from gpu_table import Line


def flashinfer_line(sizes: Sizes) -> Line:
    """FlashInfer's time on a batch of long decodes beside ours. Raises whatever its version has against the call."""
    flashinfer: Any = import_module("flashinfer")
    rows, context = sizes.decode_batch, sizes.decode_context
    case = AttentionCase.build(sizes, [1] * rows, [context] * rows, [range(0)] * rows)
    ours = seconds(case.runner(sizes, never)[0], sizes)
    tables, contexts = case.metadata.block_tables, case.metadata.context_lens
    counts = torch.tensor([0, *(len(table) for table in tables)], dtype=torch.int32)
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=sizes.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        counts.cumsum(0, dtype=torch.int32).to(sizes.device),
        torch.tensor([block for table in tables for block in table], dtype=torch.int32, device=sizes.device),
        torch.tensor([(context - 1) % BLOCK_SIZE + 1 for context in contexts], dtype=torch.int32, device=sizes.device),
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        BLOCK_SIZE,
        q_data_type=sizes.dtype,
        kv_data_type=sizes.dtype,
    )
    caches = (case.caches[0], case.caches[1])
    theirs = seconds(lambda: wrapper.run(case.query, caches), sizes)
    return Line(f"decode, {rows} rows of {context}: FlashInfer's time over ours", theirs * 1e3, "ms", theirs / ours)

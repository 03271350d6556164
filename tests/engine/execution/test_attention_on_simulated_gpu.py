"""Attention in a CUDA graph, where its two kernels follow each other."""

import pytest
import torch

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import DevicePlan
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.paged_attention.triton import attend_planned

from ...kernels.attention_cases import Case, Shape
from ...kernels.tolerances import assert_close
from .simulated_gpu import simulated_gpu
from .simulated_gpu.streams import Stream, Work


def test_decodes_and_a_prefill_are_one_line_of_a_graph(monkeypatch):
    shape = Shape((1, 20), (9, 20))
    on_host = Case.build(shape)
    with simulated_gpu(monkeypatch) as gpu, torch.inference_mode():
        case = Case.build(shape, device=torch.device("cuda", 0))
        plan = plan_attention(case.metadata, AttentionShape(4, 2, 16, torch.float32))
        held = DevicePlan.holding(plan, 4, 16, case.query.device)
        assert {"narrow", "wide"} <= held.launches
        output = torch.empty_like(case.query)

        def attend() -> None:
            attend_planned(case.query, case.key_cache, case.value_cache, held, case.scale, output)

        attend()
        graph, streams, launch = torch.cuda.CUDAGraph(), set(), gpu.timeline.launch

        def seen(work: Work, *stream: Stream) -> None:
            streams.add(gpu.timeline.current)
            launch(work, *stream)

        monkeypatch.setattr(gpu.timeline, "launch", seen)
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            attend()
        assert len(streams) == 1
        output.fill_(torch.nan)
        graph.replay()
        assert_close(output.cpu(), on_host.reference())

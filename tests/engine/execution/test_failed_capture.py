"""What a capture that failed has taken is given back."""

import pytest
import torch

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace.engine.execution.cuda_graphs import CudaCapture

from .simulated_gpu import simulated_gpu
from .simulated_gpu.graphs import Graph
from .simulated_gpu.memory import Memory, Pool


def end_allocating_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does where the driver finds nothing wrong with a capture, but has made no graph of it."""
    begin, end, pools = Memory.begin_allocate_to_pool, Graph.capture_end, []

    def begun(self: Memory, pool: Pool) -> None:
        pools.append((self, pool))
        begin(self, pool)

    def ended(self: Graph) -> None:
        memory, pool = pools[-1]
        memory.end_allocate_to_pool(0, pool)
        end(self)

    monkeypatch.setattr(Memory, "begin_allocate_to_pool", begun)
    monkeypatch.setattr(Graph, "capture_end", ended)


@pytest.mark.parametrize("is_old", [False, True], ids=["", "torch before 2.8"])
@pytest.mark.parametrize("has_ended", [False, True], ids=["still allocating", "not any more"])
def test_memory_of_a_capture_that_failed_is_free(has_ended, is_old, monkeypatch):
    with simulated_gpu(monkeypatch) as gpu, torch.inference_mode():
        there, capture = torch.ones(3, device="cuda"), CudaCapture(torch.device("cuda", 0))
        if has_ended:
            end_allocating_first(monkeypatch)

        def looks() -> None:
            torch.empty(2**12, device="cuda")
            there.tolist()

        used = gpu.memory.used
        with monkeypatch.context() as patch:
            if is_old:
                patch.delattr(torch._C, "_cuda_endAllocateToPool")
                end = gpu.memory.end_allocate_to_pool
                patch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", end, raising=False)
            with pytest.raises(RuntimeError, match="previous error during capture"):
                capture(looks)
        # Which torch refuses while it believes that a capture is under way.
        torch.cuda.empty_cache()
        assert gpu.memory.used == used

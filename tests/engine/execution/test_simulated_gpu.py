"""The simulated GPU shows what a real one would, sooner or later."""

import pytest
import torch

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from .simulated_gpu import SimulatedGpu, simulated_gpu

FIVE = [5.0] * 3


@pytest.fixture(params=[False, True], ids=["late", "hasty"])
def gpu(request, monkeypatch):
    with simulated_gpu(monkeypatch, is_hasty=request.param, total_bytes=2**20) as made, torch.inference_mode():
        yield made


@pytest.fixture
def late_gpu(monkeypatch):
    with simulated_gpu(monkeypatch, total_bytes=2**20) as made, torch.inference_mode():
        yield made


@pytest.fixture
def hasty_gpu(monkeypatch):
    with simulated_gpu(monkeypatch, is_hasty=True, total_bytes=2**20) as made, torch.inference_mode():
        yield made


def fives() -> torch.Tensor:
    return torch.full((3,), 5.0, device="cuda")


def capture(function, pool=None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool, torch.cuda.Stream()):
        function()
    return graph


def test_tensors_are_on_the_device(gpu: SimulatedGpu):
    there = fives()
    assert (there.device, there.is_cuda, there[1:].device) == (torch.device("cuda:0"), True, torch.device("cuda:0"))
    assert torch.empty(3, device="cuda").isnan().all()
    for wrong in (lambda: there + torch.ones(3), lambda: there.index_select(0, torch.tensor([0]))):
        with pytest.raises(RuntimeError, match="on the same device"):
            wrong()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        there.numpy()
    assert (there * torch.tensor(2.0)).tolist() == [10.0] * 3


def test_what_makes_the_host_wait(gpu: SimulatedGpu):
    there, index, waits = fives(), torch.zeros(1, dtype=torch.int64, device="cuda"), gpu.timeline.waits
    there[index] = there[:1].clone()
    there[there > 9] = 0.0
    there[:1] = 5.0
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    torch.empty(3, pin_memory=True).copy_(there, non_blocking=True)
    assert not waits
    for waiting in (
        lambda: there[there > 1],
        lambda: there[torch.tensor([1])],
        lambda: there[[1]],
        lambda: there.index_put_((index,), torch.tensor(1.0)),
        lambda: torch.ones(3).to("cuda", non_blocking=True),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.ones(3).pin_memory().to("cuda"),
        lambda: there.nonzero(),
        lambda: there[0].item(),
        lambda: there.tolist(),
    ):
        waits.clear()
        waiting()
        assert waits


def test_pinned_memory_may_not_be_written_before_it_is_copied(gpu: SimulatedGpu):
    pinned = torch.ones(3).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    pinned.fill_(7)
    assert there.tolist() == [7.0] * 3


def test_what_comes_back_is_there_with_its_event(gpu: SimulatedGpu):
    back, event = torch.empty(3, pin_memory=True), torch.cuda.Event()
    back.copy_(fives(), non_blocking=True)
    event.record()
    assert back.isnan().all()
    event.synchronize()
    assert back.tolist() == FIVE


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_is_to_be_waited_for(late_gpu: SimulatedGpu, waits):
    there, side = torch.empty(3, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        there.fill_(5)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    assert (there.tolist() == FIVE) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_has_to_wait(hasty_gpu: SimulatedGpu, waits):
    there, side, event = fives(), torch.cuda.Stream(), torch.cuda.Event()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = there * 2
        event.record()
    torch.cuda.synchronize()
    assert (doubled.tolist() == [10.0] * 3) == waits


def test_memory_is_its_own_streams_to_give_out_again(late_gpu: SimulatedGpu):
    """Freed while another stream has yet to read it, which `record_stream` is for."""
    there, side = fives(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = there * 2
    del there
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert torch.tensor(doubled.tolist()).isnan().all()


def test_a_graph_reads_and_writes_where_it_was_captured(gpu: SimulatedGpu):
    source, target = fives(), torch.zeros(3, device="cuda")
    graph = capture(lambda: target.copy_(source * 2))
    assert target.tolist() == [0.0] * 3
    source.fill_(1)
    graph.replay()
    assert target.tolist() == [2.0] * 3


@pytest.mark.parametrize("waits", ["both ways", "not for it", "not for what it reads"])
def test_a_graph_may_have_branches(gpu: SimulatedGpu, waits):
    source, target, side = fives(), torch.zeros(2, 3, device="cuda"), torch.cuda.Stream()

    def function():
        current = torch.cuda.current_stream()
        doubled = source * 2
        if waits != "not for what it reads":
            side.wait_stream(current)
        with torch.cuda.stream(side):
            target[0].copy_(doubled)
        target[1].copy_(doubled)
        if waits != "not for it":
            current.wait_stream(side)

    if waits != "both ways":
        with torch.cuda.stream(torch.cuda.current_stream()), pytest.raises(RuntimeError, match="CUDA error"):
            capture(function)
        return
    graph = capture(function)
    graph.replay()
    assert target.tolist() == [[10.0] * 3] * 2


def test_graphs_of_one_pool_write_over_each_other(gpu: SimulatedGpu):
    source, results, pool = fives(), [], torch.cuda.graph_pool_handle()
    # The first one's result outlives its capture, the second one finds the memory free.
    first = capture(lambda: results.append(source * 2), pool)
    kept = results[0].view(3)
    first.replay()
    assert kept.tolist() == [10.0] * 3
    there = vars(kept)["host"]
    del kept, results[:]
    second = capture(lambda: source * 3, pool)
    second.replay()
    torch.cuda.synchronize()
    assert there.isnan().all()


@pytest.mark.parametrize(
    "refused",
    [
        lambda there: there[0].item(),
        lambda there: there.nonzero(),
        lambda there: torch.ones(3).pin_memory(),
        lambda there: there.copy_(torch.ones(3)),
        lambda there: torch.cuda.synchronize(),
        lambda there: there.index_put_((there.long(),), torch.tensor(1.0)),
    ],
    ids=["item", "nonzero", "pin_memory", "copy", "synchronize", "scalar"],
)
def test_what_a_capture_refuses(gpu: SimulatedGpu, refused):
    there, stream = fives(), torch.cuda.current_stream()
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="previous error during capture"):
        capture(lambda: refused(there))
    assert there.tolist() == FIVE


def test_memory_is_counted_and_ends(gpu: SimulatedGpu):
    there = torch.empty(2**19, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 2**19
    del there
    assert torch.cuda.mem_get_info() == (2**19, 2**20)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (2**20, 2**20)

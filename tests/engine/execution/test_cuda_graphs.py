"""Steps computed with graphs answer as eager steps do. Without a GPU a graph is a function called again."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, MixtralConfig, Qwen2Config

pytest.importorskip("triton", reason="graphs launch the Triton kernels")

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution import cuda_graphs, model_runner
from headrace.engine.execution.cuda_graphs import Replay
from headrace.engine.kv_cache.kv_memory import KVMemory
from headrace.engine.request import Request
from headrace.kernels import paged_attention
from headrace.kernels.paged_attention import planning, static_plans

from ..conftest import save_random_model
from ..families import ODD_SIZES, VOCAB_SIZE
from ..running import greedy_params, run_all, token_ids

SIZES: dict[str, Any] = {
    **ODD_SIZES,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    # Layers with a window and layers without: two plans a step.
    "window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "mixture": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 60,
    "max_model_len": 150,
    "max_num_batched_tokens": 40,
}


class NoHostDependence(TorchFunctionMode):
    """Refuses what a capture refuses: the host's reading what the device computes."""

    READING = (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.nonzero)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **kwargs or {})


@dataclass
class CalledAgain:
    """In place of a graph: the function, given nothing, as a graph is. `fails_at`: the capture that fails."""

    fails_at: int | None = None
    num_captures: int = 0
    num_replays: int = 0
    alive: WeakSet[Replay] = field(default_factory=WeakSet)

    def __call__(self, function: Callable[[], None]) -> Replay:
        self.num_captures += 1
        with NoHostDependence():
            function()
        if self.num_captures == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 MiB")

        def replay() -> None:
            self.num_replays += 1
            function()

        self.alive.add(replay)
        return replay


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in made.items():
        save_random_model(MODELS[name], folder)
    return made


@pytest.fixture(scope="session")
def expected(folders: dict[str, Path]) -> Callable[[str], dict[str, list[int]]]:
    """What the CPU answers without any of this."""
    return cache(lambda name: answers(Engine.from_pretrained(folders[name], EngineConfig(**OPTIONS, device="cpu"))))


@pytest.fixture
def options(device: torch.device) -> dict[str, Any]:
    return {**OPTIONS, "device": device.type, "cuda_graph_sizes": (4, 1, 8)}


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Attention is Triton's, as on a GPU, and prefixes of two blocks are worth sharing."""
    monkeypatch.setattr(planning, "MIN_SHARED_TOKENS", ((2, 16),))
    if device.type == "cpu":
        monkeypatch.setattr(paged_attention, "runs_triton", lambda tensor: True)


def load(folder: Path, capture: CalledAgain, options: dict[str, Any]) -> Engine:
    """An engine that computes with graphs: the GPU's, or those that `capture` makes."""
    config = EngineConfig(**options)
    engine = Engine.from_pretrained(folder, config)
    if config.device == "cpu":
        runner = engine._runner
        assert isinstance(runner, model_runner.ModelRunner)
        runner.use_graphs(capture, ModelConfig.from_pretrained(folder), config)
    return engine


def tokens(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests() -> list[Request]:
    """Two groups that share a prefix each, and two that share none; they end at different times."""
    prompts = [tokens(1, 17) + tokens(10 + index, 1 + index) for index in range(3)]
    prompts += [tokens(2, 26) + tokens(20 + index, 2) for index in range(2)]
    prompts += [tokens(30, 1), tokens(32, 50)]
    return [Request(f"r{index}", prompt, greedy_params(2 + index)) for index, prompt in enumerate(prompts)]


def answers(engine: Engine) -> dict[str, list[int]]:
    """Half of the requests join while the others run."""
    wanted = requests()
    found: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for request in wanted[::2]:
        engine.add(request)
    late = wanted[1::2]
    while engine.has_work or late:
        if late:
            engine.add(late.pop())
        for event in engine.step():
            assert event.error is None
            found[event.request_id] += event.new_token_ids
        engine.check()
    return found


@pytest.mark.parametrize(("name", "is_async"), [("llama", True), ("window", False)])
@pytest.mark.usefixtures("in_triton")
def test_answers_are_the_eager_ones(name, is_async, folders, options, expected, monkeypatch, device):
    shared = []
    needed = static_plans.needed_launches

    def record(plans: Any) -> frozenset[str]:
        shared.append(max(len(plan.merge_rows) for plan in plans))
        return needed(plans)

    wanted = expected(name)
    monkeypatch.setattr(static_plans, "needed_launches", record)
    capture = CalledAgain()
    assert answers(load(folders[name], capture, {**options, "async_scheduling": is_async})) == wanted
    assert max(shared) > 0
    if device.type == "cpu":
        # Longer steps ran eagerly; each size has at most three graphs.
        assert capture.num_replays > 5
        assert 3 <= capture.num_captures <= 9


@pytest.mark.usefixtures("in_triton")
def test_padding_leaves_no_trace_in_the_cache(folders, options):
    engine = load(folders["llama"], CalledAgain(), {**options, "cuda_graph_sizes": (16,)})
    run_all(engine, [Request("r", tokens(5, 9), greedy_params(4))])
    # 12 tokens were computed: two blocks, and four slots of the second one are free.
    memory = engine._runner.memory
    assert isinstance(memory, KVMemory)
    [cached] = memory.caches
    written = cached.abs().sum(dim=(0, 1, 4, 5)) > 0
    assert int(written.sum()) == 12
    assert not written[0].any()


@pytest.mark.usefixtures("in_triton")
def test_a_capture_that_fails_is_the_last_one(folders, options, expected, caplog, device):
    if device.type == "cuda":
        pytest.skip("torch's own captures do not fail on demand")
    wanted, capture = expected("llama"), CalledAgain(fails_at=3)
    with caplog.at_level(logging.WARNING, "headrace.engine.execution.cuda_graphs"):
        assert answers(load(folders["llama"], capture, options)) == wanted
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs are off, from now on steps run eagerly: CUDA out of memory. Tried to allocate 2.00 MiB"
    ]
    assert capture.num_captures == 3
    assert not capture.alive


@pytest.mark.usefixtures("in_triton")
def test_what_the_host_decides_cannot_be_captured(folders, options, caplog, device):
    if device.type == "cuda":
        pytest.skip("on a GPU the experts of a mixture are chosen there")
    capture = CalledAgain()
    with caplog.at_level(logging.WARNING, "headrace.engine.execution.cuda_graphs"):
        engine = load(folders["mixture"], capture, options)
    assert len(token_ids(run_all(engine, [Request("r", tokens(5, 9), greedy_params(2))])["r"])) == 2
    assert "not permitted when stream is capturing" in caplog.text
    assert capture.num_captures == 1


@pytest.mark.usefixtures("in_triton")
def test_a_step_whose_plan_has_no_room_runs_eagerly(folders, options, expected, monkeypatch, device):
    wanted, capture = expected("llama"), CalledAgain()
    monkeypatch.setattr(static_plans, "_MAX_BLOCKS", 8)
    assert answers(load(folders["llama"], capture, options)) == wanted
    if device.type == "cpu":
        assert 0 < capture.num_replays < 10


@pytest.mark.usefixtures("in_triton")
def test_few_graphs_are_kept(folders, options, expected, monkeypatch, device):
    wanted, capture = expected("llama"), CalledAgain()
    monkeypatch.setattr(cuda_graphs, "max_graphs", lambda config, num_sizes: num_sizes - 2)
    engine = load(folders["llama"], capture, options)
    assert answers(engine) == wanted
    if device.type == "cpu":
        assert capture.num_captures > 3
        assert len(capture.alive) == 1
        assert isinstance(engine._runner, model_runner.ModelRunner)
        assert engine._runner.num_captures == capture.num_captures


def test_without_triton_there_are_no_graphs(folders, options, device):
    if device.type == "cuda":
        pytest.skip("there Triton is what runs")
    with pytest.raises(cuda_graphs.CaptureError, match="attention does not run as a Triton kernel"):
        load(folders["llama"], CalledAgain(), options)


def test_who_has_graphs(options, caplog):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    config, eager = EngineConfig(**options), EngineConfig(**options, enforce_eager=True)
    assert model_runner.wants_graphs(config, gpu, calls_experts=False)
    assert not model_runner.wants_graphs(eager, gpu, calls_experts=False)
    assert not model_runner.wants_graphs(config, cpu, calls_experts=False)
    with caplog.at_level(logging.INFO, "headrace.engine.execution.model_runner"):
        assert not model_runner.wants_graphs(config, gpu, calls_experts=True)
    assert "no CUDA graphs: the host calls the model's experts one by one" in caplog.text


def test_a_model_that_is_not_used_any_more_is_gone_at_once(folders, options):
    """And with it the GPU's memory, which the next one may want: not when Python next looks for cycles."""
    engine = Engine.from_pretrained(folders["llama"], EngineConfig(**options))
    run_all(engine, [Request("r", tokens(5, 9), greedy_params(4))])
    runner = engine._runner
    assert isinstance(runner, model_runner.ModelRunner)
    held: list[ref[Any]] = [ref(runner), ref(runner._model)]
    gc.collect()
    gc.disable()
    try:
        del engine, runner
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()

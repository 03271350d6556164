"""The engine's CUDA path, on a GPU that does nothing before it has to: answers are the CPU's."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")
pytest.importorskip("llguidance", reason="some requests are held to a grammar")

from triton.runtime.interpreter import InterpretedFunction

from headrace import LLM, SamplingParams
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError, EngineDeadError
from headrace.engine.execution import memory_budget, model_runner
from headrace.engine.execution.graph_sizes import graph_sizes, max_graphs
from headrace.engine.kv_cache.kv_memory import KVMemory
from headrace.engine.kv_cache.swap import PreemptionCosts
from headrace.engine.models import Decoder
from headrace.engine.offline.outputs import RequestOutput
from headrace.engine.request import Request
from headrace.engine.speculative.ngram import NgramDrafter
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.transfer import Readback
from headrace.kernels.linear import unpacked
from headrace.kernels.paged_attention import planning

from ..conftest import save_random_model
from ..families import ODD_SIZES, VOCAB_SIZE
from ..speculative.test_medusa import heads, save_heads
from .simulated_gpu import simulated_gpu

SIZES: dict[str, Any] = {
    **ODD_SIZES,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 40,
    "max_model_len": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.3, seed=4, max_tokens=4, ignore_eos=True)
# All that a step may be asked for.
EVERYTHING: list[tuple[str, SamplingParams]] = [
    ("a rather long", GREEDY),
    ("a rather slow", replace(DRAWN, top_k=5, top_p=0.9, min_p=0.05)),
    ("b", replace(GREEDY, ignore_eos=False, repetition_penalty=1.5, presence_penalty=0.5, min_tokens=3)),
    ("cd", replace(DRAWN, n=2, logprobs=2)),
    ("efg", replace(GREEDY, max_tokens=2, prompt_logprobs=1, logit_bias={70: 9.0})),
    ("h", SamplingParams(temperature=0, choices=["yes", "no"])),
    ("ij", replace(DRAWN, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[a-z]{2}[0-9]"))),
]


@pytest.fixture(scope="module")
def folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu") / "model"
    copytree(chat_folder, made)
    save_random_model(LlamaConfig(**SIZES), made)
    return made


def generate(llm: LLM, wanted: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    prompts, params = zip(*wanted, strict=True)
    outputs = llm.generate(list(prompts), list(params))
    llm.engine.check()
    return outputs


def assert_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        assert numbers(one) == pytest.approx(numbers(other), abs=1e-4)


def numbers(output: RequestOutput) -> list[float]:
    reported = [*(output.prompt_logprobs or []), *(each for one in output.outputs for each in one.logprobs or [])]
    logprobs = [logprob.logprob for each in reported if each for logprob in each.values()]
    return logprobs + [share for one in output.outputs for share in (one.probabilities or {}).values()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[RequestOutput]:
    return generate(LLM(folder, **OPTIONS, device="cpu"), EVERYTHING)


@pytest.mark.parametrize("is_hasty", [False, True])
def test_everything_at_once(is_hasty, folder, expected, monkeypatch):
    # Two sequences share a block, and that is worth an item of its own.
    monkeypatch.setattr(planning, "MIN_SHARED_TOKENS", ((2, 8),))
    # Steps with prompts in them run eagerly, or as graphs too.
    sizes = (2, 6) if is_hasty else (2, 6, 16)
    with simulated_gpu(monkeypatch, is_hasty):
        llm = LLM(folder, **OPTIONS, device="cuda", cuda_graph_sizes=sizes)
        assert_equal(generate(llm, EVERYTHING), expected)


def test_nothing_but_a_steps_end_is_waited_for(folder, monkeypatch):
    wanted = [
        (text[:2], replace(params, prompt_logprobs=None, max_tokens=2, min_tokens=min(params.min_tokens, 1)))
        for text, params in EVERYTHING
        if not params.choices
    ]
    with simulated_gpu(monkeypatch) as gpu:
        llm = LLM(folder, **OPTIONS, device="cuda", enforce_eager=True)
        gpu.timeline.waits.clear()
        generate(llm, wanted)
        assert gpu.timeline.waits == ["Event.synchronize"] * llm.engine.stats.num_steps


def test_beside_its_graph_a_decode_step_launches_one_kernel_of_ours(folder, monkeypatch):
    with simulated_gpu(monkeypatch):
        engine = LLM(folder, **OPTIONS, device="cuda", cuda_graph_sizes=(2,)).engine
        for index in range(2):
            engine.add(Request(str(index), [5, 6 + index], replace(GREEDY, max_tokens=12)))
        for _ in range(4):
            engine.step()
        launch, launched = InterpretedFunction.run, []

        def noted(self: Any, *args: Any, **kwargs: Any) -> None:
            launched.append(self.__name__)
            launch(self, *args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", noted)
        for _ in range(4):
            engine.step()
    assert launched == ["likeliest_kernel"] * 4


def test_preempted_and_swapped(folder, monkeypatch):
    wanted = [(text * 3, replace(GREEDY, max_tokens=6)) for text in ("abc", "defg", "hijkl")]
    expected = generate(LLM(folder, **OPTIONS, device="cpu"), wanted)
    # Moving is always the cheaper way.
    monkeypatch.setattr(model_runner, "preemption_costs", lambda *_: PreemptionCosts(1.0, 0.0, 0.0))
    with simulated_gpu(monkeypatch):
        tight = {**OPTIONS, "num_gpu_blocks_override": 6, "max_model_len": 48, "enable_prefix_caching": False}
        llm = LLM(folder, **tight, device="cuda", cuda_graph_sizes=(4,))
        assert_equal(generate(llm, wanted), expected)
        assert llm.engine.stats.num_swaps > 0


def test_blocks_are_moved_without_waiting(folder, monkeypatch):
    config, shape = ModelConfig.from_pretrained(folder), (2, 1, 5, 8, 1, 16)
    content = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    with simulated_gpu(monkeypatch) as gpu:
        memory = KVMemory(config, 4, 8, torch.float32, torch.device("cuda"))
        memory.caches[0].copy_(content)
        gpu.timeline.waits.clear()
        held = memory.swap_out([1, 2])
        memory.zero([1, 2])
        memory.copy([(3, 4)])
        memory.swap_in(held, 1, [3])
        assert not gpu.timeline.waits
        blocks = memory.caches[0].cpu().unbind(2)
    assert all(torch.equal(blocks[to], content[:, :, of]) for to, of in ((0, 0), (3, 2), (4, 3)))
    assert not blocks[1].any()
    assert not blocks[2].any()


def noted_numbers_of_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many sizes there are said to be graphs where memory is set aside for them."""
    noted: list[int] = []

    def note(config: EngineConfig, num_sizes: int) -> int:
        noted.append(num_sizes)
        return max_graphs(config, num_sizes)

    monkeypatch.setattr(memory_budget, "max_graphs", note)
    return noted


def test_memory_is_measured_and_enough(folder, expected, monkeypatch):
    options = {name: value for name, value in OPTIONS.items() if name != "num_gpu_blocks_override"}
    # What the driver takes for a graph is not simulated.
    monkeypatch.setattr(memory_budget, "_GRAPH_BYTES_PER_LAYER", 0)
    reckoned = noted_numbers_of_sizes(monkeypatch)
    with simulated_gpu(monkeypatch, total_bytes=8 * 2**20, others=2**20) as gpu:
        llm, memory = LLM(folder, **options, device="cuda", gpu_memory_utilization=0.8), gpu.memory
        assert reckoned == [len(graph_sizes(EngineConfig(**options), ModelConfig.from_pretrained(folder)))]
        assert_equal(generate(llm, EVERYTHING[:3]), expected[:3])
        assert 0.75 < (memory.others + memory.max_reserved) / memory.total < 0.81


def test_what_four_bits_are_unpacked_into_is_set_aside_for_graphs_too(folder, tmp_path, monkeypatch):
    """It is as much for a step of two tokens as for one of sixteen."""
    copytree(folder, tmp_path, dirs_exist_ok=True)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    sizes = {"hidden_size": 64, "intermediate_size": 1024, "quantization_config": gptq}
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    options = {name: value for name, value in OPTIONS.items() if name != "num_gpu_blocks_override"}
    options |= {"load_format": "dummy", "cuda_graph_sizes": (2,), "gpu_memory_utilization": 0.8}
    monkeypatch.setattr(memory_budget, "_GRAPH_BYTES_PER_LAYER", 0)
    monkeypatch.setattr(unpacked, "_FUSED_ROWS", 0)
    with simulated_gpu(monkeypatch, total_bytes=8 * 2**20, others=2**20) as gpu:
        llm, memory = LLM(tmp_path, **options, device="cuda"), gpu.memory
        generate(llm, EVERYTHING[:3])
        assert 0.7 < (memory.others + memory.max_reserved) / memory.total < 0.81


def test_a_model_too_large_is_refused(folder, monkeypatch):
    with simulated_gpu(monkeypatch, total_bytes=2**16), pytest.raises(ConfigError, match="the model does not fit into"):
        LLM(folder, **OPTIONS, device="cuda")


def test_steps_shrink_when_memory_ends(folder, expected, monkeypatch, caplog):
    with simulated_gpu(monkeypatch) as gpu:
        llm, memory = LLM(folder, **OPTIONS, device="cuda", enforce_eager=True, enable_prefix_caching=False), gpu.memory
        before = memory.used
        memory.max_reserved = memory.reserved = before
        assert_equal(generate(llm, EVERYTHING[:1]), expected[:1])
        # What a step of 14 tokens has taken is not there any more.
        memory.others = memory.total - before - (memory.max_reserved - before) * 4 // 5
        with caplog.at_level(logging.WARNING, "headrace.engine.engine"):
            assert_equal(generate(llm, EVERYTHING[1:2]), expected[1:2])
        assert "out of memory with" in caplog.text


def touches_what_is_not_there() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")


def step_on(engine: Engine) -> None:
    for _ in range(3):
        assert not [event for event in engine.step() if event.error]


@pytest.mark.parametrize("is_async", [False, True], ids=["", "one-step-ahead"])
@pytest.mark.parametrize("is_tainted", [False, True], ids=["", "blocks-to-zero"])
def test_a_gpu_that_computes_nothing_any_more_is_no_requests_fault(is_tainted, is_async, folder, monkeypatch):
    with simulated_gpu(monkeypatch) as gpu:
        engine = LLM(folder, **OPTIONS, device="cuda", enforce_eager=True, async_scheduling=is_async).engine
        told: list[str] = []
        engine.call_when_dead(told.append)
        for index in range(2):
            engine.add(Request(str(index), [index + 2, 3, 4], GREEDY))
        engine.step()
        gpu.timeline.launch(touches_what_is_not_there)
        if is_tainted:
            monkeypatch.setattr(engine._cache, "to_be_zeroed", lambda: torch.cuda.synchronize())
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="CUDA error: an illegal memory access was encountered Compile"):
                step_on(engine)
        assert len(told) == 1
        engine.call_when_dead(told.append)
        assert told[0] == told[1]


def test_a_capture_that_fails_leaves_nothing_behind(folder, expected, monkeypatch, caplog):
    forward = Decoder.forward

    def looks(self: Decoder, token_ids: Tensor, *rest: Any, **named: Any) -> Tensor:
        if len(token_ids) == 2:
            token_ids.max().item()
        return forward(self, token_ids, *rest, **named)

    monkeypatch.setattr(Decoder, "forward", looks)
    with simulated_gpu(monkeypatch) as gpu:
        llm = LLM(folder, **OPTIONS, device="cuda", cuda_graph_sizes=(2, 6))
        with caplog.at_level(logging.WARNING, "headrace.engine.execution.cuda_graphs"):
            assert_equal(generate(llm, EVERYTHING[:3]), expected[:3])
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "CUDA graphs are off, from now on steps run eagerly"
        ]
        # Which torch refuses while it believes that a capture is under way.
        torch.cuda.empty_cache()
        assert gpu.timeline.current is gpu.timeline.default


def test_guesses_right_and_wrong(folder, expected, monkeypatch):
    said = [*expected[0].prompt_token_ids, *expected[0].outputs[0].token_ids]

    def draft(self: NgramDrafter, token_ids: Sequence[int], number: int) -> tuple[int, ...]:
        place = len(token_ids)
        return (*said[place : place + number - 1], VOCAB_SIZE - 1)

    monkeypatch.setattr(NgramDrafter, "draft", draft)
    with simulated_gpu(monkeypatch, is_hasty=True):
        config = {"method": "ngram", "num_speculative_tokens": 3}
        llm = LLM(folder, **OPTIONS, device="cuda", cuda_graph_sizes=(4,), speculative_config=config)
        assert_equal(generate(llm, EVERYTHING[:1]), expected[:1])
        stats = llm.engine.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_draft_models_guesses_are_all_that_is_waited_for_besides(folder, expected, monkeypatch):
    with simulated_gpu(monkeypatch, is_hasty=True) as gpu:
        config = {"model": str(folder), "num_speculative_tokens": 3}
        llm = LLM(folder, **OPTIONS, enforce_eager=True, device="cuda", speculative_config=config)
        gpu.timeline.waits.clear()
        assert_equal(generate(llm, EVERYTHING[:1]), expected[:1])
        stats = llm.engine.stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens == 3
        assert gpu.timeline.waits == ["Event.synchronize"] * (stats.num_steps + 1)


def test_a_draft_model_with_graphs_in_what_memory_is_left(folder, expected, monkeypatch):
    options = {name: value for name, value in OPTIONS.items() if name != "num_gpu_blocks_override"}
    # What the driver takes for a graph is not simulated.
    monkeypatch.setattr(memory_budget, "_GRAPH_BYTES_PER_LAYER", 0)
    reckoned = noted_numbers_of_sizes(monkeypatch)
    config = {"model": str(folder), "num_speculative_tokens": 3}
    with simulated_gpu(monkeypatch, total_bytes=8 * 2**20, others=2**20) as gpu:
        llm = LLM(folder, **options, device="cuda", gpu_memory_utilization=0.8, speculative_config=config)
        sizes = graph_sizes(EngineConfig(**options), ModelConfig.from_pretrained(folder))
        # The draft model's steps have two tokens of each sequence at most.
        assert sorted(reckoned) == [sum(size <= 2 * options["max_num_seqs"] for size in sizes), len(sizes)]
        assert_equal(generate(llm, EVERYTHING[:1]), expected[:1])
        assert 0.75 < (gpu.memory.others + gpu.memory.max_reserved) / gpu.memory.total < 0.81
        assert llm.engine.stats.num_accepted_tokens == llm.engine.stats.num_draft_tokens == 3


@pytest.mark.parametrize("options", [{"cuda_graph_sizes": (2, 6)}, {"enforce_eager": True}], ids=str)
def test_medusa_heads(options, folder, expected, tmp_path, monkeypatch):
    said = [*expected[0].prompt_token_ids, *expected[0].outputs[0].token_ids]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder)
        hidden = model(torch.tensor([said]), output_hidden_states=True).hidden_states[-1][0]
    save_heads(tmp_path, heads(hidden.clone(), said, len(expected[0].prompt_token_ids) - 2))
    config = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 3}
    with simulated_gpu(monkeypatch, is_hasty=True):
        llm = LLM(folder, **OPTIONS, **options, device="cuda", speculative_config=config)
        assert_equal(generate(llm, EVERYTHING[:1]), expected[:1])
        assert llm.engine.stats.num_accepted_tokens == llm.engine.stats.num_draft_tokens == 3


def test_a_cache_in_8_bits(folder, monkeypatch):
    def answers(**options: Any) -> list[RequestOutput]:
        with simulated_gpu(monkeypatch):
            return generate(LLM(folder, **OPTIONS, device="cuda", kv_cache_dtype="fp8", **options), EVERYTHING[:2])

    plainly = answers(enforce_eager=True, async_scheduling=False)
    assert_equal(answers(cuda_graph_sizes=(2, 6)), plainly)


def stages_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is on its way to the device lies in the same pinned memory."""
    memory = torch.empty(2**12, dtype=torch.uint8).pin_memory()

    def pin(tensor: Tensor) -> Tensor:
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    monkeypatch.setattr(Tensor, "pin_memory", pin)


def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readback, "wait", lambda self: [copy.numpy() for copy in self._copies])


@pytest.mark.parametrize("fault", [stages_in_one_place, reads_at_once])
def test_faults_show(fault, folder, expected, monkeypatch):
    with simulated_gpu(monkeypatch):
        llm = LLM(folder, **OPTIONS, device="cuda", cuda_graph_sizes=(2, 6))
        fault(monkeypatch)
        found = [output.outputs[0].token_ids for output in generate(llm, EVERYTHING[:1])]
    assert found != [output.outputs[0].token_ids for output in expected[:1]]

"""What an adapter may not be, said in one line when it is loaded; and how many are held."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, LoRARequest, SamplingParams
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError, InvalidRequestError, ModelError
from headrace.engine.llm import Prompt
from headrace.engine.request import Request, RequestOutputKind

from ..running import greedy_params, run_all
from .adapters import save_adapter
from .conftest import Adapted
from .test_lora import load


@pytest.fixture(scope="module")
def model(adapted: Callable[[str], Adapted]) -> Adapted:
    return adapted("llama")


def start(model: Adapted, adapter: Path, **options: Any) -> Engine:
    return load(model, lora_modules=[LoRARequest("x", 1, str(adapter))], **options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("peft_type", "LOHA"),
        ("r", 0),
        ("r", 0.5),
        ("init_lora_weights", "pissa"),
        ("lora_alpha", "much"),
    ],
)
def test_settings_that_are_not_supported(model, tmp_path, field, value):
    adapter = save_adapter(model.folder, tmp_path)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=f"adapter_config.json: {field} must be .*, not {value!r}".replace("[", r"\[")):
        start(model, adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_missing(model, tmp_path, name):
    (save_adapter(model.folder, tmp_path) / name).unlink()
    with pytest.raises(ModelError, match=f"has no {name}"):
        start(model, tmp_path)


def test_a_folder_that_is_missing(model, tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        start(model, tmp_path / "nowhere")


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({A: torch.zeros(4, 9)}, r"q_proj.lora_A.weight .* has shape \(4, 9\); .* ask for \(4, 72\)"),
        ({A: torch.full((4, 72), torch.nan)}, "q_proj.lora_A.weight .* not finite"),
        # Finite before it is scaled: 0 × infinity would be what others' rows get of it.
        ({A.replace("_A", "_B"): torch.full((72, 4), 3e38)}, "q_proj.lora_B.weight .* not finite in float32"),
        ({A: torch.zeros(4, 72).to(torch.float8_e4m3fn)}, "q_proj.lora_A.weight .* is float8_e4m3fn: save"),
        ({A: None}, "lacks the tensor .*q_proj.lora_A.weight"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 72)}, "lm_head.lora_A.weight, .* target_modules"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 307)}, "embed_tokens"),
        ({A.replace("layers.0", "layers.7"): torch.zeros(4, 72)}, "layers.7"),
    ],
    ids=["shape", "not-finite", "scaled", "fp8", "half", "head", "embedding", "layer"],
)
def test_tensors_that_do_not_fit(model, tmp_path, changed, message):
    file = save_adapter(model.folder, tmp_path) / "adapter_model.safetensors"
    tensors = load_file(file) | changed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ModelError, match=message):
        start(model, tmp_path)


def test_a_rank_above_the_highest(model, tmp_path):
    adapter = save_adapter(model.folder, tmp_path, rank=17)
    with pytest.raises(ConfigError, match="r=17, above max_lora_rank=16: raise max_lora_rank to 17"):
        start(model, adapter)
    start(model, adapter, max_lora_rank=17)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_modules": [LoRARequest("x", 1, "x")]}, "enable_lora"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_experts_are_no_targets(adapted):
    experts = adapted("qwen3-moe")
    engine = load(experts)
    with pytest.raises(InvalidRequestError, match="experts"):
        engine.add(Request("x", [1], lora_request=experts.loras[0]))
    attention = [Request("x", experts.prompts[1], greedy_params(32), lora_request=experts.loras[2])]
    answer = [token for event in run_all(engine, attention)["x"] for token in event.new_token_ids]
    assert experts.is_greedy(2, 1, answer)


def test_an_adapter_where_lora_is_off(model):
    llm = LLM(model.folder, skip_tokenizer_init=True, num_gpu_blocks_override=20)
    with pytest.raises(InvalidRequestError, match=r"prompt 0: lora_request .* enable_lora=True"):
        llm.generate({"prompt_token_ids": [1]}, lora_request=model.loras[0])


def test_one_adapter_for_each_prompt(model):
    llm = LLM(model.folder, skip_tokenizer_init=True, num_gpu_blocks_override=100, enable_lora=True)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts: list[Prompt] = [{"prompt_token_ids": model.prompts[1]} for _ in model.loras]
    for lora, output in enumerate(llm.generate(prompts, params, lora_request=model.loras)):
        assert model.is_greedy(lora, 1, output.outputs[0].token_ids)
    with pytest.raises(InvalidRequestError, match="lora_request: 2 for 1 prompts"):
        llm.generate(prompts[:1], params, lora_request=model.loras[:2])
    with pytest.raises(InvalidRequestError, match="must be a LoRARequest, or one for each prompt, not 'kind'"):
        llm.generate(prompts[:1], params, lora_request="kind")  # type: ignore[arg-type]


def test_more_adapters_than_places(model):
    """A request waits until nobody uses one of those that are held, and later ones wait behind it."""
    engine = load(model, max_loras=2)
    wanted = {"first": 0, "second": 1, "waits": 2, "behind": 0, "base": 3, "gone": 2}
    for name, lora in wanted.items():
        engine.add(Request(name, model.prompts[1], greedy_params(32), lora_request=model.loras[lora]))
    assert engine.stats.num_waiting == 6
    with pytest.raises(InvalidRequestError, match="already in use"):
        engine.add(Request("waits", [1], lora_request=model.loras[2]))
    assert engine.abort("gone")
    answers: dict[str, list[int]] = {name: [] for name in wanted}
    order = []
    while engine.has_work:
        for event in engine.step():
            answers[event.request_id] += event.new_token_ids
            if event.finished:
                order.append(event.request_id)
        engine.check()
    assert order[3:] == ["waits", "behind"]
    assert all(model.is_greedy(wanted[name], 1, answer) for name, answer in answers.items() if name != "gone")


def test_one_that_waits_for_a_place_can_be_watched(model):
    engine = load(model, max_loras=1)
    for name, lora in (("first", 0), ("waits", 1), ("unwatched", 1)):
        request = Request(name, model.prompts[1], greedy_params(6), lora_request=model.loras[lora])
        engine.add(replace(request, output_kind=RequestOutputKind.FINAL_ONLY))
    engine.step()
    assert engine.watch("waits") is None
    events = [event.request_id for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
    assert [events.count(name) for name in ("first", "waits", "unwatched")] == [1, 6, 1]


def test_modules_beyond_the_places_are_checked_and_change_places(model):
    """As in vLLM: `max_loras` is how many are held at a time."""
    engine = load(model, max_loras=1, lora_modules=model.loras[:3])
    assert engine._runner.loras is not None
    assert list(engine._runner.loras._held) == [model.loras[2].folder]
    request = Request("x", model.prompts[1], greedy_params(32), lora_request=model.loras[0])
    answer = [token for event in run_all(engine, [request])["x"] for token in event.new_token_ids]
    assert model.is_greedy(0, 1, answer)


def test_an_adapter_that_turns_out_to_be_none(model, tmp_path):
    """Once there is a place for it; those behind it go on."""
    engine = load(model, max_loras=1)
    lora = LoRARequest("x", 1, str(save_adapter(model.folder, tmp_path, rank=17)))
    engine.add(Request("first", model.prompts[0], greedy_params(2), lora_request=model.loras[0]))
    engine.add(Request("bad", model.prompts[0], greedy_params(2), lora_request=lora))
    engine.add(Request("last", model.prompts[0], greedy_params(2), lora_request=model.loras[1]))
    ends: dict[str, str | None] = {}
    while engine.has_work:
        ends |= {event.request_id: event.error for event in engine.step() if event.finished}
    assert ends["first"] is None
    assert "max_lora_rank" in str(ends["bad"])
    assert ends["last"] is None


def test_nothing_is_kept_for_requests_that_wait_for_their_adapter(model):
    """Aborted, they would never have come."""
    engine = load(model, max_loras=1)
    engine.add(Request("held", model.prompts[0], greedy_params(2), lora_request=model.loras[0]))
    engine.add(Request("other", model.prompts[0], greedy_params(2), lora_request=model.loras[1]))
    engine.add(Request("waits", model.prompts[2], greedy_params(2), lora_request=model.loras[0]))
    engine.expect_prefix(model.prompts[2], 1, model.loras[0])
    for name in ("waits", "other", "held"):
        assert engine.abort(name)
    assert not engine._cache._expected


def test_an_adapter_that_was_replaced_in_its_folder(model, tmp_path):
    engine = load(model, max_loras=1)
    lora = LoRARequest("x", 1, str(save_adapter(model.folder, tmp_path, seed=1)))
    run_all(engine, [Request("x", [1], greedy_params(2), lora_request=lora)])
    save_adapter(model.folder, tmp_path, seed=2)
    run_all(engine, [Request("x", [1], greedy_params(2), lora_request=lora)])
    run_all(engine, [Request("x", [1], greedy_params(2), lora_request=model.loras[0])])
    with pytest.raises(InvalidRequestError, match="is another than before"):
        engine.add(Request("x", [1], greedy_params(2), lora_request=lora))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((5, 1, "x"), "^lora_name must be a text, not 5$"),
        (("kind", "1", "x"), "^lora_int_id must be a whole number, not '1'$"),
        (("kind", True, "x"), "^lora_int_id must be a whole number, not True$"),
        (("kind", 1, None), "^lora_path must be a path, not None$"),
    ],
)
def test_a_request_whose_fields_are_of_another_type(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LoRARequest(*fields)


def test_a_requests_folder_may_be_a_path(tmp_path: Path) -> None:
    given: tuple[Any, ...] = ("kind", np.int64(1), tmp_path)
    assert LoRARequest(*given) == LoRARequest("kind", 1, str(tmp_path))

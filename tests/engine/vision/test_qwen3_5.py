"""Qwen3.5 sees and answers as transformers' does; rows with the same image begin from one state after it."""

import json

import pytest

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters, weight_bytes
from headrace.engine.errors import ModelError
from headrace.engine.llm import LLM
from headrace.engine.sampling_params import SamplingParams

from ..running import run_all, token_ids
from .seeing import Oracle, save_qwen3_5
from .test_images_in_prompts import DOG, PROMPTS, answers, new_engine, num_encoded

EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}


@pytest.fixture(scope="module", params=[{}, EXPERTS], ids=["dense", "mixture"])
def oracle(request, tmp_path_factory) -> Oracle:
    folder = tmp_path_factory.mktemp("qwen3_5")
    return Oracle(folder, save_qwen3_5(folder, **request.param))


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [({"max_num_batched_tokens": 13}, False), ({"num_gpu_blocks_override": 16}, True)],
    ids=["chunked", "preempted"],
)
def test_together(oracle, options, is_preempted):
    expected = {name: oracle.answer(oracle.request(name, *parts), *parts) for name, parts in PROMPTS.items()}
    assert len(set(expected["two"])) > 5
    engine = new_engine(oracle, **options)
    assert answers(engine, [oracle.request(name, *parts) for name, parts in PROMPTS.items()]) == expected
    assert (engine.stats.num_preemptions > 0) == is_preempted
    assert num_encoded(engine) == 2


def test_rows_with_the_same_image(oracle):
    engine = new_engine(oracle)
    asked = ["What is it?", "Is it alive?", "How many of it?"]
    requests = [oracle.request(question, "Look: ", DOG, question) for question in asked]
    events = run_all(engine, requests)
    for request, question in zip(requests, asked, strict=True):
        assert token_ids(events[question]) == oracle.answer(request, "Look: ", DOG, question)
    # The text before it and the image, all 32 tokens of both.
    assert [events[question][-1].num_cached_tokens for question in asked] == [0, 32, 32]


def test_the_next_turn_of_a_conversation_begins_after_the_image(oracle):
    """Asked one by one; where many conversations are, nobody is going to ask their next turns."""
    llm = LLM(oracle.folder, block_size=8, num_gpu_blocks_override=100)
    params = SamplingParams(temperature=0, max_tokens=12)
    about = [{"type": "text", "text": "Look: "}, {"type": "image_pil", "image_pil": DOG}]
    chat = [{"role": "user", "content": [*about, {"type": "text", "text": "What is it, and is it alive?"}]}]
    [first] = llm.chat(chat, params)
    chat += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "How many?"}]
    [second] = llm.chat(chat, params)
    kept = (len(first.prompt_token_ids) - 8) // 8 * 8
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, kept)
    fresh = LLM(oracle.folder, block_size=8, num_gpu_blocks_override=100)
    assert [each.outputs for each in fresh.chat([chat[:1], chat], params)] == [first.outputs, second.outputs]


def test_how_large_it_is(oracle):
    held = sum(parameter.numel() for parameter in oracle.model.parameters())
    assert num_parameters(oracle.config) == held
    assert weight_bytes(oracle.config, 4) == 4 * held


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "no layer attends, as layer_types, .* says: supported are models"),
        ({"layer_types": ["mamba"] * 4}, "layer_types has mamba; supported: linear_attention, full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is no multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2, not 1"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be at least 1, not 0"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, oracle, fields, message):
    raw = json.loads((oracle.folder / "config.json").read_text())
    raw["text_config"] |= fields
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(tmp_path)

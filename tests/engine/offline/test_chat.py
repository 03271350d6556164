"""Chats: what the model's template makes of them."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.sampling_params import SamplingParams

from ..conftest import continuation

TICKETS_MODEL = Path(__file__).parents[3] / "examples/tickets/model"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
HELLO = [{"role": "user", "content": "Hello"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "I say "}]


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=64, max_num_seqs=3, max_num_batched_tokens=20)


def check_chat(llm: LLM, tokenizer, model) -> None:
    chats = [
        [{"role": "system", "content": "Sort the ticket."}, {"role": "user", "content": text}]
        for text in ("My parcel has not arrived.", "Please cancel my contract.", "Love it!")
    ]
    outputs = llm.chat(chats, GREEDY)
    for chat, output in zip(chats, outputs, strict=True):
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == ids
        assert list(output.outputs[0].token_ids) == continuation(model, ids)
    assert llm.chat(chats[0], GREEDY)[0].outputs == outputs[0].outputs


def test_chat_is_transformers_template_and_generate(llm, chat_folder, chat_model):
    check_chat(llm, AutoTokenizer.from_pretrained(chat_folder), chat_model)


def test_chat_with_the_example_model():
    llm = LLM(TICKETS_MODEL, dtype="float32", num_gpu_blocks_override=128)
    model = AutoModelForCausalLM.from_pretrained(TICKETS_MODEL, dtype=torch.float32).eval()
    check_chat(llm, AutoTokenizer.from_pretrained(TICKETS_MODEL), model)


def test_a_chat_shows_the_model_its_tools(chat_folder, tmp_path):
    folder = copytree(chat_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ tools | tojson }}")
    llm = LLM(folder, num_gpu_blocks_override=64, max_num_seqs=1)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    [output] = llm.chat([{"role": "user", "content": "a"}], GREEDY, tools=tools)
    assert output.prompt == json.dumps(tools)


def test_a_chats_prompt_may_end_elsewhere(llm):
    """As transformers' and vLLM's do; this template strips what it writes."""
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    assert llm.chat(HELLO, GREEDY)[0].prompt == "<s>user: Hello</s>\nassistant:"
    assert llm.chat(HELLO, GREEDY, add_generation_prompt=False)[0].prompt == "<s>user: Hello</s>\n"
    assert llm.chat(BEGUN, GREEDY, **ends)[0].prompt == "<s>user: Hello</s>\nassistant: I say"
    plain = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    assert llm.chat(BEGUN, GREEDY, chat_template=plain, **ends)[0].prompt == "[Hello][I say "


def test_a_chat_through_another_template(llm):
    template = "{{ bos_token }}{{ messages[0].content }}{{ tone }}"
    [output] = llm.chat(HELLO, GREEDY, chat_template=template, chat_template_kwargs={"tone": "!"})
    assert (output.prompt, output.prompt_token_ids) == ("<s>Hello!", [0, *llm.get_tokenizer().encode("Hello!")])


def test_parts_of_text_are_one_text_to_the_template(llm):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    [output] = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert output.prompt == "<s>user: one\ntwo</s>\nassistant:"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([[]], {}, "messages: a conversation has at least one message"),
        ([{"content": "a"}], {}, "messages: message 0 must be an object with a role, not {'content': 'a'}"),
        ([{"role": "user", "content": 5}], {}, "messages: message 0: content must be a text or a list of parts, not 5"),
        ([*HELLO, {"role": "user", "content": ["a"]}], {}, "message 1: a part of content must be an object of type"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "message 0: a part of content must be an object"),
        (HELLO, {"continue_final_message": True}, "continue_final_message .*: with it say add_generation_prompt=False"),
        (HELLO, {"chat_template": "{% if %}"}, "chat_template is malformed"),
        (
            [{"role": "assistant", "tool_calls": []}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message needs a last message whose content is a text",
        ),
        (
            HELLO,
            {"continue_final_message": True, "add_generation_prompt": False, "chat_template": "none"},
            "continue_final_message: the model's chat template does not write the last message out",
        ),
    ],
)
def test_a_chat_that_cannot_be_put_into_the_template(llm, messages, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(messages, GREEDY, **options)


def test_arguments_have_vllms_places(llm):
    expected = llm.chat(HELLO, GREEDY)[0].outputs
    assert llm.chat(HELLO, GREEDY, False, None)[0].outputs == expected

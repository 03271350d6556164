"""Whole models that think as Gemma 4 does, by the offline face; and texts of theirs, token by token."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.reasoning import ThinkingStage
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.text.detokenizer import Detokenizer
from headrace.engine.text.tokenizer import Tokenizer

from ..gemma4_chats import gemma4_copy

MODEL = Path(__file__).parents[3] / "examples/tickets/model"
CHAT: list[Any] = [{"role": "user", "content": "Where is my parcel?"}]
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": [1, "x"]}'}}
CALLED = [*CHAT, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "name": "f", "content": "21"}]


@pytest.fixture(scope="module", params=["large", "small"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = gemma4_copy(MODEL, tmp_path_factory.mktemp("gemma"), is_small=request.param == "small")
    return LLM(folder, max_num_seqs=4, num_gpu_blocks_override=64)


def whole(llm: LLM, tokens: Any) -> str:
    return llm.get_tokenizer().decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("budget", [0, 5])
def test_an_expression_holds_what_follows_the_thinking(llm, budget):
    digits = StructuredOutputsParams(regex="[0-9]{4,9}")
    params = SamplingParams(max_tokens=60, reasoning=True, thinking_token_budget=budget, structured_outputs=digits)
    [output] = llm.chat([CHAT], params)
    answer = output.outputs[0]
    assert whole(llm, output.prompt_token_ids).startswith("<bos><|turn>system\n<|think|>\n<turn|>")
    assert re.fullmatch("[0-9]{4,9}", answer.text)
    assert answer.reasoning is not None
    assert bool(answer.reasoning) == bool(budget)
    assert not answer.reasoning.startswith("thought")
    said = whole(llm, answer.token_ids)
    assert said.startswith("<|channel>thought\n")
    assert said.removesuffix("<turn|>").endswith(f"<channel|>{answer.text}")


def test_it_thinks_where_it_is_told_to_alone(llm):
    choosing = SamplingParams(choices=["billing", "shipping"])
    [plain] = llm.chat([CHAT], choosing)
    assert "<|think|>" not in whole(llm, plain.prompt_token_ids)
    # The caller's word goes before.
    parted = SamplingParams(choices=["billing", "shipping"], reasoning=True)
    [told] = llm.chat([CHAT], parted, chat_template_kwargs={"enable_thinking": False})
    assert told.prompt_token_ids == plain.prompt_token_ids
    assert told.outputs[0].token_ids == plain.outputs[0].token_ids
    assert told.outputs[0].reasoning == ""


@pytest.mark.parametrize("is_small", [False, True])
def test_how_far_prompts_have_come(tmp_path, is_small):
    tokenizer = Tokenizer.from_pretrained(gemma4_copy(MODEL, tmp_path, is_small))
    thinking = tokenizer.reasoning(True)
    assert thinking is not None

    def stage(messages: Any, is_guided: bool, **told: bool) -> ThinkingStage:
        text = tokenizer.apply_chat_template(messages, told)
        return thinking.stage(tokenizer.encode(text, add_special_tokens=False), is_guided)

    for is_guided in (False, True):
        off = ThinkingStage.DONE if is_guided else ThinkingStage.NOT_BEGUN
        assert stage(CHAT, is_guided) is (off if is_small else ThinkingStage.DONE)
        assert stage(CHAT, is_guided, enable_thinking=True) is ThinkingStage.NOT_BEGUN
        assert stage(CALLED, is_guided) is off
        assert stage(CALLED, is_guided, enable_thinking=True) is ThinkingStage.OPEN


def test_a_conversation_shows_what_was_called(tmp_path):
    tokenizer = Tokenizer.from_pretrained(gemma4_copy(MODEL, tmp_path))
    text = tokenizer.apply_chat_template(CALLED)
    assert '<|tool_call>call:f{b:[1,<|"|>x<|"|>]}<tool_call|><|tool_response>response:f{value:<|"|>21' in text


def test_texts_have_the_special_tokens_of_calls_in_them(tmp_path):
    tokenizer = Tokenizer.from_pretrained(gemma4_copy(MODEL, tmp_path))
    call = '<|tool_call>call:f{a:<|"|>é<|"|>}<tool_call|>'
    tokens = tokenizer.encode(f"<|channel>Hm.<channel|>{call}<|tool_response>", add_special_tokens=False)
    for skips, text in ((True, f"Hm.{call}"), (False, f"<|channel>Hm.<channel|>{call}<|tool_response>")):
        assert tokenizer.decode(tokens, skips) == text
        detokenizer = Detokenizer(tokenizer, skips)
        assert "".join(map(detokenizer.add, tokens)) == text


@pytest.mark.parametrize(("begin", "thinks"), [("", False), ("{{ '<|think|>' if enable_thinking }}", True)])
def test_a_model_thinks_if_its_template_can_tell_it_to(tmp_path, begin, thinks):
    folder = gemma4_copy(MODEL, tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    plain = "{% for message in messages %}{{ message.content.split('<channel|>')[-1] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": begin + plain}))
    tokenizer = Tokenizer.from_pretrained(folder)
    if thinks:
        assert tokenizer.reasoning(True) is not None
    else:
        with pytest.raises(InvalidRequestError, match="the model does not think"):
            tokenizer.reasoning(True)

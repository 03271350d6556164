"""Whole models that think, by the offline face: the answer alone, held to what is asked of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.text.tokenizer import Tokenizer

from ..thinking import thinking_copy

MODEL = Path(__file__).parents[3] / "examples/tickets/model"
LABELS = ["billing", "shipping", "refund"]
PROMPTS = ["Where is my parcel?", "I was charged twice.", "The app crashes."]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(thinking_copy(MODEL, tmp_path_factory.mktemp("thinker")), max_num_seqs=4, num_gpu_blocks_override=64)


def chats(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.mark.parametrize("kwargs", [{}, {"open": True}])
@pytest.mark.parametrize("budget", [0, 5, None])
def test_an_expression_holds_the_answer_and_not_the_thinking(llm, budget, kwargs):
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=60,
        reasoning=True,
        thinking_token_budget=budget,
        # Tickets' model would not end it by itself.
        logit_bias={llm.get_tokenizer().fast.token_to_id("</think>"): 12.0},
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4,9}"),
    )
    for output in llm.chat(chats(*PROMPTS), params, chat_template_kwargs=kwargs):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert re.fullmatch("[0-9]{4,9}", answer.text)
        assert answer.reasoning is not None
        assert "think>" not in answer.reasoning + answer.text
        assert bool(answer.reasoning) or budget == 0
        whole = llm.get_tokenizer().decode(answer.token_ids)
        assert f"</think>\n\n{answer.text}" in whole
        assert whole.startswith("<think>") is not bool(kwargs)


def test_json_follows_it_too(llm):
    schema = {
        "type": "object",
        "properties": {"label": {"enum": LABELS}},
        "required": ["label"],
        "additionalProperties": False,
    }
    shape = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(
        temperature=0, max_tokens=60, reasoning=True, thinking_token_budget=4, structured_outputs=shape
    )
    for output in llm.chat(chats(*PROMPTS), params):
        assert json.loads(output.outputs[0].text)["label"] in LABELS


def test_choices_follow_what_was_thought(llm):
    params = SamplingParams(temperature=0, max_tokens=8, choices=LABELS, reasoning=True)
    for output in llm.chat(chats(*PROMPTS), params):
        answer = output.outputs[0]
        assert answer.text in LABELS
        assert answer.reasoning
        thinking = list(answer.token_ids[: -len(llm.get_tokenizer().encode(answer.text, add_special_tokens=False))])
        plain = SamplingParams(temperature=0, choices=LABELS)
        again = llm.generate({"prompt_token_ids": [*output.prompt_token_ids, *thinking]}, plain)[0].outputs[0]
        assert again.text == answer.text
        assert again.probabilities == pytest.approx(answer.probabilities, abs=1e-5)


def test_a_prompt_that_forbids_it_is_answered_at_once(llm):
    params = SamplingParams(temperature=0, max_tokens=8, choices=LABELS, reasoning=True)
    plain = SamplingParams(temperature=0, max_tokens=8, choices=LABELS)
    [output] = llm.chat(chats(PROMPTS[0]), params, chat_template_kwargs={"enable_thinking": False})
    [other] = llm.chat(chats(PROMPTS[0]), plain, chat_template_kwargs={"enable_thinking": False})
    assert output.outputs[0].reasoning == ""
    assert output.outputs[0].probabilities == other.outputs[0].probabilities


def test_a_model_without_markers_does_not_think():
    llm = LLM(MODEL, max_num_seqs=2, num_gpu_blocks_override=16)
    with pytest.raises(InvalidRequestError, match="the model does not think"):
        llm.chat(chats(PROMPTS[0]), SamplingParams(reasoning=True))


def test_a_model_whose_template_never_mentions_it_does_not_think(tmp_path):
    """As Qwen3's later instructed ones, whose vocabulary has the markers."""
    folder = thinking_copy(MODEL, tmp_path / "thinker")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    plain = "{% for message in messages %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endfor %}"
    for template in (plain, None, plain + "{{ '</think>' }}"):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        tokenizer = Tokenizer.from_pretrained(folder)
        if template is plain:
            with pytest.raises(InvalidRequestError, match="reasoning: the model does not think"):
                tokenizer.reasoning(True)
        else:
            assert tokenizer.reasoning(True) is not None

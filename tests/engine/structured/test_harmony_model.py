"""Whole models that write in harmony's format, by the offline face; and texts of theirs, token by token."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.text.detokenizer import StopStrings
from headrace.engine.text.finished_answer import answer_text, num_tokens_before, reasoning_text
from headrace.engine.text.tokenizer import Tokenizer

from ..harmony import harmony_copy

MODEL = Path(__file__).parents[3] / "examples/tickets/model"
LABELS = ["billing", "shipping", "refund"]
TEXTS = ["Where is my parcel?", "I was charged twice."]
HEADER = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>It is about a final parcel.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harmony_copy(MODEL, tmp_path_factory.mktemp("harmony"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_num_seqs=4, num_gpu_blocks_override=64)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(folder)


def chats(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


def whole(llm: LLM, tokens: Any) -> str:
    return str(llm.get_tokenizer().fast.decode(list(tokens), skip_special_tokens=False))


def test_without_thinking_the_final_message_begins_at_once(llm):
    free = SamplingParams(temperature=0, max_tokens=12)
    for output in llm.chat(chats(*TEXTS), free):
        assert whole(llm, output.prompt_token_ids).endswith(f"<|end|><|start|>assistant{HEADER}")
        assert output.outputs[0].reasoning is None
    # As whoever writes the header himself.
    held = SamplingParams(temperature=0, choices=LABELS)
    for text, output in zip(TEXTS, llm.chat(chats(*TEXTS), held), strict=True):
        prompt = f"<|start|>user<|message|>{text}<|end|><|start|>assistant{HEADER}"
        token_ids = llm.get_tokenizer().encode(prompt, add_special_tokens=False)
        same = llm.generate({"prompt_token_ids": token_ids}, held)[0].outputs[0]
        assert output.outputs[0].text == same.text in LABELS
        assert output.outputs[0].probabilities == pytest.approx(same.probabilities, abs=1e-5)


def test_prompts_side_by_side_think_each_as_it_is_asked(llm):
    plain, thinking = (SamplingParams(temperature=0, max_tokens=30, reasoning=each) for each in (False, True))
    outputs = llm.chat(chats(*TEXTS), [plain, thinking])
    assert [whole(llm, output.prompt_token_ids).endswith(HEADER) for output in outputs] == [True, False]


@pytest.mark.parametrize("budget", [0, 5, None])
def test_an_expression_holds_the_final_message(llm, budget):
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=90,
        reasoning=True,
        thinking_token_budget=budget,
        # Tickets' model would not end it by itself.
        logit_bias={llm.get_tokenizer().fast.token_to_id("<|end|>"): 9.0},
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4,9}"),
    )
    for output in llm.chat(chats(*TEXTS), params):
        answer = output.outputs[0]
        said = whole(llm, answer.token_ids)
        assert answer.finish_reason == "stop"
        assert re.fullmatch("[0-9]{4,9}", answer.text)
        assert said.startswith("<|channel|>analysis<|message|>")
        assert said.endswith(f"<|end|><|start|>assistant{HEADER}{answer.text}<|return|>")
        assert answer.reasoning is not None
        assert not {"analysis", "assistant"} & set(answer.reasoning.split())
        assert bool(answer.reasoning) or budget == 0


def test_json_and_choices_follow_what_was_thought(llm):
    schema = {"type": "object", "properties": {"label": {"enum": LABELS}}, "required": ["label"]}
    shape = StructuredOutputsParams(json={**schema, "additionalProperties": False}, disable_any_whitespace=True)
    thinking: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "reasoning": True, "thinking_token_budget": 4}
    for output in llm.chat(chats(*TEXTS), SamplingParams(**thinking, structured_outputs=shape)):
        assert json.loads(output.outputs[0].text)["label"] in LABELS
    for output in llm.chat(chats(*TEXTS), SamplingParams(**thinking, choices=LABELS)):
        answer = output.outputs[0]
        assert answer.text in LABELS
        thought = list(answer.token_ids[: -len(llm.get_tokenizer().encode(answer.text, add_special_tokens=False))])
        plain = SamplingParams(temperature=0, choices=LABELS)
        again = llm.generate({"prompt_token_ids": [*output.prompt_token_ids, *thought]}, plain)[0].outputs[0]
        assert answer.probabilities == pytest.approx(again.probabilities, abs=1e-5)


def test_a_free_answer_after_a_budget_is_what_a_prompt_with_that_thought_goes_on_with(llm):
    params = SamplingParams(temperature=0, max_tokens=40, reasoning=True, thinking_token_budget=6)
    for output in llm.chat(chats(*TEXTS), params):
        answer = output.outputs[0]
        before = num_tokens_before(request_of(llm.get_tokenizer(), output.prompt_token_ids), answer.token_ids)
        plain = SamplingParams(temperature=0, max_tokens=40 - before)
        prompt = [*output.prompt_token_ids, *answer.token_ids[:before]]
        again = llm.generate({"prompt_token_ids": prompt}, plain)[0].outputs[0]
        assert answer.text == again.text.lstrip()
        assert answer.reasoning


def request_of(tokenizer: Tokenizer, prompt: Any, **params: Any) -> Request:
    asked = SamplingParams(reasoning=True, **params)
    checker = StopStrings.of(tokenizer, asked, prompt)
    return Request("r", prompt, asked, stop_checker=checker, reasoning=tokenizer.reasoning(True))


PROMPT = "<|start|>user<|message|>Where?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("said", "answer", "reasoning"),
    [
        (f"{THOUGHT}{HEADER}On its way.<|return|>", "On its way.", "It is about a final parcel."),
        (f"{HEADER}On its way.<|return|>", "On its way.", ""),
        (
            f"{THOUGHT}<|channel|>commentary<|message|> I look.<|end|><|start|>assistant{HEADER}Yes.<|return|>",
            "Yes.",
            "It is about a final parcel. I look.",
        ),
        (f"{THOUGHT}<|channel|>final json<|message|>{{}}<|return|>", "{}", "It is about a final parcel."),
        (f"{THOUGHT}<|return|>", "", "It is about a final parcel."),
        ("On its way.<|return|>", "On its way.", ""),
    ],
)
def test_texts_are_parted(tokenizer, said, answer, reasoning):
    prompt, tokens = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, said))
    request = request_of(tokenizer, prompt)
    assert answer_text(tokenizer, request, tokens, FinishReason.STOP) == answer
    assert reasoning_text(tokenizer, request, tokens, FinishReason.STOP) == reasoning


def test_a_stop_is_looked_for_in_the_final_message(tokenizer):
    said = f"{THOUGHT}{HEADER}A parcel, final"
    prompt, tokens = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, said))
    request = request_of(tokenizer, prompt, stop=["parcel", "assistant"])
    assert request.stop_checker is not None
    stopped = [request.stop_checker(token) for token in tokens].index(True)
    assert whole_text(tokenizer, tokens[: stopped + 1]).endswith(f"{HEADER}A parcel")
    assert answer_text(tokenizer, request, tokens[: stopped + 1], FinishReason.STOP) == "A "


def whole_text(tokenizer: Tokenizer, tokens: Any) -> str:
    return str(tokenizer.fast.decode(list(tokens), skip_special_tokens=False))


def test_whether_a_model_writes_so_its_vocabulary_and_template_say(folder, tmp_path):
    harmony = Tokenizer.from_pretrained(harmony_copy(MODEL, tmp_path / "harmony"))
    assert harmony.thinks_unless_told
    config = json.loads((tmp_path / "harmony/tokenizer_config.json").read_text())
    plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "harmony/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": plain}))
    assert not Tokenizer.from_pretrained(tmp_path / "harmony").thinks_unless_told
    other = Tokenizer.from_pretrained(MODEL)
    assert not other.thinks_unless_told
    with pytest.raises(InvalidRequestError, match=r"<think>…</think>, .*, <\|channel\|>: leave it out"):
        other.reasoning(True)


def test_a_template_may_ask_for_the_date(tmp_path):
    folder = harmony_copy(MODEL, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}<|channel|>")
    text = Tokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "Hi"}])
    assert re.fullmatch(r"2\d{3}-\d\d-\d\d Hi<\|channel\|>", text)

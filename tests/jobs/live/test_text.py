"""What is given out of a growing answer is never taken back, and in the end it is the answer."""

import random
from collections.abc import Sequence
from functools import partial

import pytest

from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.reasoning import ReasoningTokens
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.text.detokenizer import StopStrings
from headrace.engine.text.finished_answer import answer_text
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.live.text import GrowingText

from ...engine.harmony import harmony_copy
from ..running import MODEL

TEXTS = ("It cost 12 €, naïve 😀👩‍👩‍👧 日本語 ok", "  two  spaces\n\nand\ttabs ", "ENDe END", "aab aaab", "é" * 7)
STOPS = ((), ("END",), ("aaab", "b "), ("€", "語 o"), ("👩‍👩",), ("nothing such",))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(MODEL)


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int], params: SamplingParams, resume_at: int) -> tuple[str, str]:
    """The text as it is given out, by two attempts, and the answer's."""
    request = Request("r", (1,), params, stop_checker=StopStrings.of(tokenizer, params))
    kept: list[int] = []
    reason = FinishReason.LENGTH
    for token in token_ids:
        kept.append(token)
        if request.stop_checker is not None and request.stop_checker(token):
            reason = FinishReason.STOP
            break
    answer = answer_text(tokenizer, request, kept, reason)
    first = GrowingText.of(tokenizer, request)
    before = [first.add(token) for token in kept[: min(resume_at, len(kept) - 1)]]
    text = GrowingText.of(tokenizer, request)
    text.resume(kept[: len(before)], before)
    pieces = before + [text.add(token) for token in kept[len(before) : -1]]
    for length in range(len(pieces) + 1):
        assert answer.startswith("".join(pieces[:length]))
    return "".join(pieces) + text.owed(answer), answer


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_real_texts(text, stop, tokenizer):
    for include in (False, True):
        params = SamplingParams(stop=stop, include_stop_str_in_output=include)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for cut in range(1, len(token_ids) + 1):
            given, answer = streamed(tokenizer, token_ids[:cut], params, resume_at=cut // 2)
            assert given == answer


def test_special_tokens_that_are_written_out(tokenizer):
    end = tokenizer.eos_token_id
    token_ids = [*tokenizer.encode("END", add_special_tokens=False), end, end, *tokenizer.encode("END")]
    for stop in ((), ("E" + tokenizer.decode([end], skip_special_tokens=False)[:1],), ("DE",)):
        params = SamplingParams(stop=stop, skip_special_tokens=False, include_stop_str_in_output=True)
        for cut in range(1, len(token_ids) + 1):
            given, answer = streamed(tokenizer, token_ids[:cut], params, resume_at=cut // 2)
            assert given == answer
    assert tokenizer.decode([end], skip_special_tokens=False) in answer


def test_tokens_at_random(tokenizer):
    """Most are parts of characters that never become whole."""
    draw = random.Random(4)
    for _ in range(300):
        token_ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(1, 30))]
        given, answer = streamed(tokenizer, token_ids, SamplingParams(stop=draw.choice(STOPS)), draw.randint(0, 30))
        assert given == answer


def test_half_a_character_waits(tokenizer):
    text = GrowingText(tokenizer)
    token_ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(token_ids) > 1
    assert [text.add(token) for token in token_ids] == [*[""] * (len(token_ids) - 1), "😀"]


def test_what_may_become_a_stop_waits(tokenizer):
    text = GrowingText(tokenizer, ("END",))
    assert "".join(text.add(token) for token in tokenizer.encode("see EN", add_special_tokens=False)) == "see "
    assert text.held == "EN"
    assert "".join(text.add(token) for token in tokenizer.encode("Dx", add_special_tokens=False)[:0]) == ""
    assert text.owed("see EN") == "EN"


@pytest.mark.parametrize("stops", [(), ("END",), ("x\n",)])
def test_what_is_thought_comes_with_its_markers_whatever_the_stops(stops):
    tokenizer = Tokenizer.from_pretrained(MODEL)
    # Two of its special tokens stand for the markers.
    start, end = 1, 2
    tokenizer._reasoning = tokens = ReasoningTokens(start, end)
    markers = {token: tokenizer.fast.id_to_token(token) for token in (start, end)}
    encode = partial(tokenizer.encode, add_special_tokens=False)
    said = [start, *encode("first x\nEND of it\n"), end, *encode("\n\nthe answer END")]
    params = SamplingParams(stop=stops, reasoning=True)
    # The last token's text is owed.
    for cut in range(len(said)):
        request = Request("r", (5, 6, 7), params, reasoning=tokens)
        text = GrowingText.of(tokenizer, request)
        before = [text.add(token) for token in said[:cut]]
        text = GrowingText.of(tokenizer, request)
        text.resume(said[:cut], before)
        given = "".join([*before, *(text.add(token) for token in said[cut:-1])])
        answer = "the answer " if "END" in stops else "the answer END"
        whole = f"{markers[start]}first x\nEND of it\n{markers[end]}{answer}"
        assert given + text.owed(answer) == whole


@pytest.mark.parametrize("stops", [(), ("final",), ("x\n",)])
def test_what_is_thought_in_messages_of_their_own_comes_with_their_headers(stops, tmp_path):
    tokenizer = Tokenizer.from_pretrained(harmony_copy(MODEL, tmp_path))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    thought = "<|channel|>analysis<|message|>x\nfinal of it<|end|><|start|>assistant<|channel|>final<|message|>"
    prompt, said = (5, 6, *encode("<|start|>assistant")), encode(f"{thought}the answer, final")
    params = SamplingParams(stop=stops, reasoning=True)
    # The last token's text is owed.
    for cut in range(len(said)):
        request = Request("r", prompt, params, reasoning=tokenizer.reasoning(True))
        text = GrowingText.of(tokenizer, request)
        before = [text.add(token) for token in said[:cut]]
        text = GrowingText.of(tokenizer, request)
        text.resume(said[:cut], before)
        given = "".join([*before, *(text.add(token) for token in said[cut:-1])])
        answer = "the answer, " if "final" in stops else "the answer, final"
        assert given + text.owed(answer) == f"{thought}{answer}"


@pytest.mark.parametrize(("is_held", "expected"), [(True, " \n 12"), (False, "12")])
def test_blanks_that_a_grammar_asks_for_are_streamed(is_held, expected):
    tokenizer = Tokenizer.from_pretrained(MODEL)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    tokenizer._reasoning = tokens = ReasoningTokens(1, 2, tuple(encode("\n\n")))
    shape = StructuredOutputsParams(regex="[ \n]+[0-9]+") if is_held else None
    params = SamplingParams(reasoning=True, structured_outputs=shape)
    request = Request("r", (5, 6, 7), params, reasoning=tokens)
    said = [1, *encode("x"), 2, *tokens.break_token_ids, *encode(" \n 12")]
    answer = answer_text(tokenizer, request, said, FinishReason.LENGTH)
    for cut in range(len(said)):
        text = GrowingText.of(tokenizer, request)
        before = [text.add(token) for token in said[:cut]]
        text = GrowingText.of(tokenizer, request)
        text.resume(said[:cut], before)
        given = "".join([*before, *(text.add(token) for token in said[cut:])])
        assert given.partition(str(tokenizer.fast.id_to_token(2)))[2] == expected
    assert answer == expected

"""Text that grows with its tokens, never by half a character, and ends at its stop strings."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.reasoning import ReasoningTokens
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.text.detokenizer import Detokenizer, StopStrings, first_stop
from headrace.engine.text.finished_answer import answer_text, reasoning_text
from headrace.engine.text.tokenizer import Tokenizer

TEXTS = ["plain words", "héllo wörld", "日本語のテキスト", "a 🙂 in 👩‍👩‍👧 between", "\n\ttabs  and   spaces ", "ﷺ́"]
TICKETS_MODEL = Path(__file__).parents[3] / "examples/tickets/model"


def byte_fallback() -> FastTokenizer:
    """As Llama 2's: words, and bytes where there is no word."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: index for index, word in enumerate(words)}
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    return fast


def byte_level() -> FastTokenizer:
    """As GPT-2's without a single merge: each byte is a token."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fast = FastTokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    return fast


MAKERS = {"byte level": byte_level, "byte fallback": byte_fallback, "merges": lambda: None}


@cache
def tokenizer(kind: str) -> Tokenizer:
    fast = MAKERS[kind]()
    return Tokenizer.from_pretrained(TICKETS_MODEL) if fast is None else Tokenizer(Path(), fast, {})


kinds = pytest.mark.parametrize("kind", MAKERS)


@kinds
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_whole_characters_and_add_up_to_the_text(kind, text):
    ids = tokenizer(kind).encode(text)
    detokenizer = Detokenizer(tokenizer(kind))
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) == tokenizer(kind).decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@kinds
def test_special_tokens_are_left_out(kind):
    special = next(token for token in range(5) if tokenizer(kind).decode([token]) == "")
    ids = tokenizer(kind).encode("ab")
    detokenizer = Detokenizer(tokenizer(kind))
    assert "".join(map(detokenizer.add, [special, ids[0], special, *ids[1:], special])) == "ab"


@kinds
def test_bytes_that_are_no_text_stop_nothing(kind):
    """A model may answer anything: no error, and what follows is text again."""
    generator = random.Random(2)
    fast = tokenizer(kind)
    for _ in range(100):
        detokenizer = Detokenizer(fast)
        for _ in range(60):
            # Some are outside the tokenizer's vocabulary, as a model's may be larger.
            detokenizer.add(generator.randrange(fast.vocab_size + 5))
        assert "".join(map(detokenizer.add, fast.encode("ab ab abc"))).endswith("b abc")


def naive_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Character by character: the first end at which some stop ends, and the earliest it begins."""
    for end in range(1, len(text) + 1):
        if begins := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return min(begins), end
    return None


@given(st.text("ab\n", max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_first_stop_is_the_one_a_reader_meets_first(text, stops):
    assert first_stop(text, stops) == naive_stop(text, stops)


@given(st.text("ab🙂é", max_size=12), st.lists(st.text("ab🙂é", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_is_found_however_the_tokens_cut_the_text(text, stops):
    expected = naive_stop(text, stops)
    for kind in MAKERS:
        checker = StopStrings(tokenizer(kind), SamplingParams(stop=stops))
        stopped = any(checker(token) for token in tokenizer(kind).encode(text))
        assert stopped == (expected is not None)
        assert checker.answer == (text[: expected[0]] if expected else None)


def answer(params: SamplingParams, text: str, kind: str = "byte level") -> tuple[int, str | None]:
    """After how many tokens `text` ends, and what is left of it."""
    checker = StopStrings(tokenizer(kind), params)
    for count, token in enumerate(tokenizer(kind).encode(text), 1):
        if checker(token):
            return count, checker.answer
    return 0, checker.answer


def test_the_stop_string_is_in_the_answer_only_if_asked_for():
    assert answer(SamplingParams(stop="END"), "the END of it") == (7, "the ")
    assert answer(SamplingParams(stop="END", include_stop_str_in_output=True), "the END of it") == (7, "the END")


def test_what_the_last_token_has_after_the_stop_is_cut_off():
    words = tokenizer("merges").encode("the order")
    checker = StopStrings(tokenizer("merges"), SamplingParams(stop="rd", include_stop_str_in_output=True))
    assert any(map(checker, words))
    assert checker.answer == "the ord"


def test_stops_wait_for_the_minimum_length():
    assert answer(SamplingParams(stop="a", min_tokens=0), "bababa") == (2, "b")
    assert answer(SamplingParams(stop="a", min_tokens=2), "bababa") == (4, "bab")
    assert answer(SamplingParams(stop="a", min_tokens=6), "bababa") == (0, None)
    # Begun before the minimum and complete after it.
    assert answer(SamplingParams(stop="baba", min_tokens=3), "bababa") == (4, "")


def test_an_answer_that_was_cut_within_a_character_ends_before_it():
    fast = tokenizer("byte level")
    ids = fast.encode("né🙂")
    texts = [
        answer_text(fast, Request("r", [1], SamplingParams()), ids[:count], FinishReason.LENGTH)
        for count in range(1, len(ids) + 1)
    ]
    assert texts == ["n", "n", "né", "né", "né", "né", "né🙂"]


def test_a_stop_token_is_in_the_text_only_if_asked_for():
    fast = tokenizer("byte level")
    ids = fast.encode("abc")
    for include, expected in ((False, "ab"), (True, "abc")):
        params = SamplingParams(stop_token_ids=ids[2:], include_stop_str_in_output=include)
        assert answer_text(fast, Request("r", [1], params), ids, FinishReason.STOP) == expected


def test_an_end_token_that_the_tokenizer_does_not_know_as_special_is_no_text():
    fast = tokenizer("byte level")
    assert answer_text(fast, Request("r", [1], SamplingParams()), fast.encode("abc"), FinishReason.STOP) == "ab"


def test_only_stop_strings_make_the_engine_wait_for_text():
    fast = tokenizer("byte level")
    assert StopStrings.of(fast, SamplingParams(stop_token_ids=[3], min_tokens=2, logprobs=1)) is None
    assert StopStrings.of(fast, SamplingParams(stop=[])) is None
    assert StopStrings.of(fast, SamplingParams(stop="a")) is not None


@kinds
def test_stops_of_any_length_are_found_in_a_long_answer(kind):
    text = "ab " * 300 + "abba abb"
    for stop in ("b", "abba", "ab ab", "ab " * 40 + "abba"):
        checker = StopStrings(tokenizer(kind), SamplingParams(stop=[stop, "never to be found in it" * 9]))
        assert any(map(checker, tokenizer(kind).encode(text)))
        assert checker.answer == text[: text.index(stop)]


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=128, max_num_seqs=3, max_num_batched_tokens=20)


# The chat folder's model answers any bytes: these leave it letters only.
LETTERS: dict[str, Any] = {
    "logit_bias": {token: -100.0 for token in range(307) if not 66 <= token < 92},
    "max_tokens": 40,
    "ignore_eos": True,
}


def test_answers_end_at_their_stops_whatever_their_batch_mates_do(llm):
    prompts = ["one", "two", "three", "four"]
    free = [SamplingParams(seed=seed, **LETTERS) for seed in range(4)]
    whole = [output.outputs[0] for output in llm.generate(prompts, free)]
    assert all(output.text.isalpha() and len(output.text) == 40 for output in whole)
    stops = [whole[0].text[7:10], [whole[1].text[20], "never"], "never", None]
    held = [SamplingParams(seed=seed, stop=stop, **LETTERS) for seed, stop in enumerate(stops)]
    cut = [output.outputs[0] for output in llm.generate(prompts, held)]
    for index, stop in ((0, whole[0].text[7:10]), (1, whole[1].text[20])):
        end = whole[index].text.index(stop)
        assert cut[index].text == whole[index].text[:end]
        assert cut[index].token_ids == whole[index].token_ids[: end + len(stop)]
        assert cut[index].finish_reason == "stop"
    assert cut[2:] == whole[2:]
    assert [output.finish_reason for output in cut[2:]] == ["length"] * 2
    assert llm.generate(prompts[0], held[0])[0].outputs[0] == cut[0]


def test_a_stop_at_the_last_token_is_a_stop(llm):
    whole = llm.generate("one", SamplingParams(seed=1, **LETTERS))[0].outputs[0].text
    params = SamplingParams(seed=1, stop=whole[-9:], include_stop_str_in_output=True, **LETTERS)
    output = llm.generate("one", params)[0].outputs[0]
    assert (output.text, output.finish_reason) == (whole, "stop")


def test_each_of_n_samples_has_its_own_stop(llm):
    params: dict[str, Any] = {"n": 3, "seed": 3, **LETTERS}
    whole = [output.text for output in llm.generate("one", SamplingParams(**params))[0].outputs]
    stop = whole[2][11:13]
    cut = [output.text for output in llm.generate("one", SamplingParams(stop=stop, **params))[0].outputs]
    assert cut == [text.split(stop)[0] for text in whole]
    assert cut[2] != whole[2]


def test_a_request_ends_when_its_checker_says_so_and_frees_its_memory(llm):
    engine: Engine = llm.engine
    seen: list[int] = []

    def third(token: int) -> bool:
        seen.append(token)
        return len(seen) == 3

    engine.add(Request("r", [5, 6, 7], SamplingParams(ignore_eos=True), stop_checker=third))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert [event.new_token_ids[0] for event in events] == seen
    assert [event.finish_reason for event in events] == [None, None, FinishReason.STOP]
    assert engine.stats.num_running == 0


def thinker() -> tuple[Tokenizer, ReasoningTokens]:
    """A tokenizer of single bytes, two of whose special tokens are markers."""
    made = Tokenizer(Path(), byte_level(), {})
    made._reasoning = ReasoningTokens(0, 1, tuple(made.encode("\n\n")))
    return made, made._reasoning


@pytest.mark.parametrize("blanks", ["", "\n\n", " \n"])
@pytest.mark.parametrize(("stop", "expected"), [("\n", "ab"), ("b", "a"), ("\n\n", "ab\nc"), ("x", "ab\nc")])
def test_a_stop_is_looked_for_from_where_the_answer_begins(blanks, stop, expected):
    made, tokens = thinker()
    params = SamplingParams(stop=stop, reasoning=True)
    checker = StopStrings.of(made, params, [5])
    request = Request("r", [5], params, stop_checker=checker, reasoning=tokens)
    assert checker is not None
    said = []
    for token in [0, *made.encode("x\n\n"), 1, *made.encode(f"{blanks}ab\nc")]:
        said.append(token)
        if checker(token):
            break
    assert answer_text(made, request, said, FinishReason.LENGTH) == expected


@pytest.mark.parametrize(("is_held", "expected"), [(True, " \n a"), (False, "a")])
@pytest.mark.parametrize("stop", [None, "b"])
def test_blanks_that_a_grammar_asks_for_are_kept(is_held, expected, stop):
    made, tokens = thinker()
    shape = StructuredOutputsParams(regex="[ \n]+a") if is_held else None
    params = SamplingParams(stop=stop, reasoning=True, structured_outputs=shape)
    checker = StopStrings.of(made, params, [5])
    request = Request("r", [5], params, stop_checker=checker, reasoning=tokens)
    said = [0, *made.encode("x"), 1, *made.encode("\n\n \n a"), *made.encode("b" if stop else "")]
    ends = [checker(token) for token in said] if checker is not None else []
    assert ends == [False] * (len(said) - 1) + [True] or not stop
    assert answer_text(made, request, said, FinishReason.LENGTH) == expected


def test_half_a_character_that_a_budget_cut_off_is_left_out():
    made, tokens = thinker()
    request = Request("r", [5], SamplingParams(reasoning=True), reasoning=tokens)
    said = [0, *made.encode("xé")[:-1], 1, *made.encode("a")]
    assert reasoning_text(made, request, said, FinishReason.STOP) == "x"

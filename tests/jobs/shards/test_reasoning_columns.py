"""A job whose model thinks first: its answers are what follows, and what was thought has columns of its own."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.logprobs import Logprob
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.reasoning import ReasoningTokens
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.jobs.errors import SpecError
from headrace.jobs.hosting.outcomes import Answer
from headrace.jobs.planning.planner import make_planner
from headrace.jobs.shards.voting import voted_columns
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.readers import open_input

from ...engine.fakes import CONTEXT, fake_answer, make_engine
from ...engine.running import run_all, token_ids
from ..answers import GatedRunner, hosted
from ..attempts import ask
from ..models import write_model_folder
from ..running import write_lines
from ..shop import Shop

START, END = 8, 9
WORDS = ("<end>", *"abcdefg", "<think>", "</think>", "j")
THINKING = ReasoningTokens(START, END)
ROWS = ask((1, 2, START), (3, START), (4, 5, 6, START), (7, START), (START,), (2, 2, 1, START))
CHOICES = ("a", "b", "c d")
CHOICE_IDS = ((1,), (2,), (3, 4))


@pytest.fixture
def thinker(shop: Shop, tmp_path: Path) -> Shop:
    """The shop, with a model that thinks."""
    shop.model = write_model_folder(tmp_path / "thinker", words=WORDS)
    return shop


def words(tokens: list[int] | tuple[int, ...]) -> str:
    return " ".join(WORDS[token] for token in tokens if token)


def test_the_output_is_what_follows_the_thinking(thinker):
    thinker.create(ROWS, sampling={"max_tokens": 30, "temperature": 2.0, "reasoning": True})
    thinker.attempt().run()
    thinker.assert_settled()
    outputs = []
    for row, values in zip(ROWS, thinker.table().to_pylist(), strict=True):
        plain = replace(thinker.params(row.row), reasoning=False)
        said = fake_answer(Request("r", row.prompt_token_ids or [], plain), CONTEXT)
        split = THINKING.split(row.prompt_token_ids or [], said)
        assert values["reasoning"] == words(split.reasoning)
        assert values["output"] == words(split.answer)
        assert (values["completion_tokens"], values["reasoning_tokens"]) == (len(said), split.num_reasoning)
        outputs.append(values["output"])
    assert any(outputs)


def test_a_stop_is_one_of_the_answers(thinker):
    thinker.create(
        ROWS, sampling={"max_tokens": 30, "temperature": 2.0, "reasoning": True, "stop": ["a", "b", "c", "d", "e"]}
    )
    thinker.attempt().run()
    rows = thinker.table().to_pylist()
    assert not any(set("abcde") & set(values["output"]) for values in rows)
    assert any(set("abcde") & set(values["reasoning"]) for values in rows)


def chosen(row: int, shop: Shop, sample: int = 0) -> tuple[list[int], Any]:
    """The tokens of a row's answer, and its last event, of an engine that has nothing else to do."""
    params = shop.params(row, CHOICES).of_sample(sample)
    request = Request("r", ROWS[row].prompt_token_ids or [], params, CHOICE_IDS, reasoning=THINKING)
    events = run_all(make_engine()[0], [request])["r"]
    return token_ids(events), events[-1]


def test_a_label_is_chosen_after_the_thinking(thinker):
    thinker.create(ROWS, choices=CHOICES, sampling={"max_tokens": 6, "reasoning": True})
    thinker.attempt().run()
    thinker.assert_settled()
    for row, values in enumerate(thinker.table().to_pylist()):
        said, last = chosen(row, thinker)
        assert values["label"] == values["output"] == CHOICES[last.choice_index]
        assert tuple(values["probabilities"].values()) == last.choice_probabilities
        assert values["reasoning"] == words(said[: said.index(END)])
        assert values["completion_tokens"] == len(said)


def test_each_vote_thinks_for_itself(thinker):
    sampling = {"max_tokens": 6, "reasoning": True, "temperature": 2.0, "n": 5, "seed": 4}
    thinker.create(ROWS, choices=CHOICES, sampling=sampling, vote=True)
    with hosted(GatedRunner(), max_num_seqs=8) as (host, _):
        thinker.attempt(tools=replace(thinker.tools, host=host)).run()
    num_opinions = []
    for row, values in enumerate(thinker.table().to_pylist()):
        samples = [chosen(row, thinker, sample) for sample in range(len(values["outputs"]))]
        labels = [CHOICES[last.choice_index] for _, last in samples]
        assert values["outputs"] == labels
        most = max(map(labels.count, labels))
        assert labels.count(values["label"]) == most
        assert values["agreement"] == most / len(labels)
        assert values["completion_tokens"] == sum(len(said) for said, _ in samples)
        num_opinions.append(len(set(labels)))
    assert max(num_opinions) > 1


def test_the_break_before_a_held_answer_makes_no_vote_the_likelier(thinker):
    """Which the guide wrote, not the model."""
    shape = StructuredOutputsParams(choice=["a", "b"])
    held = SamplingParams(n=2, reasoning=True, logprobs=0, structured_outputs=shape)
    thinking = ReasoningTokens(START, END, (10,))
    samples = []
    for answer, break_logprob, logprob in ((1, -5.0, -1.0), (2, -0.1, -2.0)):
        tokens = (3, END, 10, answer, 0)
        known = tuple(
            {token: Logprob(each, 1)} for token, each in zip(tokens, (-1, -1, break_logprob, logprob, 0), strict=True)
        )
        request = Request("r", (START,), held, reasoning=thinking)
        samples.append((request, Answer("r", tokens, FinishReason.STOP, 0, None, None, known)))
    columns = voted_columns(thinker.tools.tokenizer, samples)
    assert (columns["output"], columns["outputs"]) == ("a", ["a", "b"])


def test_an_answer_that_is_nothing_but_thinking_has_no_vote(thinker):
    sampling = {"max_tokens": 8, "reasoning": True, "temperature": 2.0, "n": 5, "seed": 4}
    thinker.create(ROWS, sampling=sampling, vote=True)
    thinker.attempt().run()
    thinker.assert_settled()
    num_outvoted = 0
    for values in thinker.table().to_pylist():
        said = [text.strip() for text in values["outputs"] if text]
        counts = {vote["answer"]: vote["count"] for vote in values["votes"]}
        assert counts == Counter(said)
        assert values["output"].strip() == (values["votes"][0]["answer"] if said else "")
        assert values["agreement"] == max(counts.values(), default=0) / len(values["outputs"])
        num_outvoted += 0 < len(said) < len(values["outputs"]) / 2
    assert num_outvoted


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Any]:
    """Checks a job over a line of these values."""

    def check(model: Path, **values: Any) -> Any:
        path = write_lines(tmp_path / "input.jsonl", values)
        spec = JobSpec.parse(model=str(model), prompt="{text}", sampling={"reasoning": True})
        return make_planner(spec, None, tmp_path / "sort").check(open_input(path))

    return check


def test_a_model_that_does_not_think_is_refused(plan, model, tmp_path):
    with pytest.raises(SpecError, match=r"reasoning: the model does not think, .*<think>…</think>"):
        plan(model, text="a")
    thinker = write_model_folder(tmp_path / "thinker", words=WORDS)
    assert plan(thinker, text="a")
    with pytest.raises(SpecError, match="reasoning writes the column 'Reasoning', which the input has already"):
        plan(thinker, text="a", Reasoning="b")


def test_who_does_not_ask_for_it_has_the_job_of_before():
    plain = JobSpec.parse(model="m", prompt="{text}")
    assert not {"reasoning", "thinking_token_budget"} & set(plain.stored()["sampling"])
    asked = JobSpec.parse(model="m", prompt="{text}", sampling={"reasoning": True, "thinking_token_budget": 0})
    assert asked.stored()["sampling"]["thinking_token_budget"] == 0
    assert plain.fingerprint("f") != asked.fingerprint("f")

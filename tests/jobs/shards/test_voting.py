"""The answer of the majority: whichever samples it takes, it is that of all, and no more are generated than needed."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from headrace.engine.request import Request
from headrace.engine.sampling.sampler import pick_choice
from headrace.jobs.errors import SpecError, Stopped
from headrace.jobs.shards.voting import num_wanted, opinion
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.ledger.records import JobState

from ...engine.fakes import CONTEXT, fake_answer, fake_logits
from ..answers import GatedRunner, hosted
from ..attempts import ask
from ..shop import Shop

ROWS = ask((1, 2), (3,), (4, 5, 6), (7, 8), (9,), (2, 2), (10, 1), (6,))
SHORT = {"max_tokens": 1, "temperature": 0.7, "n": 5, "seed": 3}
DRAWN = {"temperature": 3.0, "n": 9, "seed": 1}


def texts(shop: Shop, row: int) -> list[str]:
    """What all samples of a row say."""
    params, prompt = shop.params(row), shop.rows[row].prompt_token_ids or ()
    answers = [fake_answer(Request("r", prompt, params.of_sample(index)), CONTEXT) for index in range(params.n)]
    return [shop.tools.tokenizer.decode(answer) for answer in answers]


@pytest.mark.parametrize("num_samples", [1, 2, 3, 6])
def test_what_is_not_asked_could_not_have_changed_the_majority(num_samples):
    for opinions in product("abc", repeat=num_samples):
        known: tuple[str, ...] = ()
        while (more := num_wanted(known, num_samples)) > 0:
            known = opinions[: len(known) + more]
        settled, in_all = Counter(known), Counter(opinions)
        if len(known) < num_samples:
            (winner, count), *others = settled.most_common()
            assert count > num_samples - len(known) + max((each for _, each in others), default=0)
            assert all(in_all[winner] > in_all[other] for other in in_all if other != winner)
        # With one answer less it would have been open.
        assert num_samples == 1 or num_wanted(known[:-1], num_samples) > 0


def test_as_many_are_asked_at_a_time_as_can_settle_it_at_best():
    assert [num_wanted((), count) for count in (1, 2, 5, 8)] == [1, 2, 3, 5]
    assert num_wanted("aaa", 5) == 0
    assert num_wanted("aab", 5) == 1
    assert num_wanted("abc", 5) == 2
    assert num_wanted("aabb", 5) == 1
    assert num_wanted("aabbc", 5) == 0


def test_what_counts_as_the_same_answer():
    assert opinion(' {"b": 1,\n "a": "ü"}') == opinion('{"a":"ü","b":1}')
    assert opinion("[1, 2]") != opinion("[2, 1]")
    assert opinion(" yes\n") == "yes" != opinion("Yes")
    assert opinion("{not JSON") == "{not JSON"


def test_the_majority_answers_and_says_how_sure_it_is(shop):
    shop.create(ROWS, sampling=SHORT, vote=True)
    shop.attempt().run()
    shop.assert_settled()
    num_asked = 0
    for row, values in zip(ROWS, shop.table().to_pylist(), strict=True):
        said, asked = texts(shop, row.row), values["outputs"]
        assert asked == said[: len(asked)]
        counts = Counter(each.strip() for each in asked)
        assert {vote["answer"]: vote["count"] for vote in values["votes"]} == counts
        first = values["votes"][0]
        assert (first["answer"], first["count"]) == (values["output"].strip(), max(counts.values()))
        assert values["agreement"] == first["count"] / len(asked)
        assert Counter(each.strip() for each in said)[first["answer"]] == max(Counter(map(str.strip, said)).values())
        num_asked += len(asked)
    assert len(ROWS) * 3 < num_asked < len(ROWS) * 5
    assert "logprobs" not in shop.table().column_names


def test_of_as_many_votes_the_likelier_answer_wins(shop):
    shop.create(ROWS, sampling=SHORT | {"n": 2, "temperature": 2.0, "logprobs": True}, vote=True)
    shop.attempt().run()
    tied = [values for values in shop.table().to_pylist() if values["agreement"] == 0.5]
    assert tied
    wins = set()
    for values in tied:
        params = shop.params(values["row"])
        prompt = shop.rows[values["row"]].prompt_token_ids or ()
        plain = [Request("r", prompt, replace(params.of_sample(index), logprobs=None)) for index in range(2)]
        logprobs = [likelihood(request) for request in plain]
        wins.add(winner := logprobs.index(max(logprobs)))
        assert values["output"] == values["outputs"][winner]
        assert values["logprobs"][0]["logprob"] == pytest.approx(max(logprobs))
    assert wins == {0, 1}


def likelihood(request: Request) -> float:
    """The logarithm of the probability of a sample's one token."""
    (token,) = fake_answer(request, CONTEXT)
    return float(fake_logits(request.prompt_token_ids).log_softmax(-1)[token])


def test_neither_the_batch_nor_a_stop_in_between_changes_anything(shop, start):
    """Whatever is in flight together, and wherever an attempt ends: the same samples, and each row once."""
    shop.create(ROWS, sampling=SHORT, vote=True)
    shop.runner.close()
    attempt = shop.attempt()
    running = start(attempt.run)
    # In the middle of the first waves.
    shop.runner.permit(8)
    for _ in range(8):
        shop.runner.wait_until_reached()
    attempt.stop()
    with pytest.raises(Stopped):
        running.result(60)
    shop.ledger.leases.release(attempt.claim)
    shop.runner.open()
    with hosted(GatedRunner(), max_num_seqs=32) as (host, _):
        tools = replace(shop.tools, host=host)
        assert shop.attempt(tools=tools).run() is JobState.COMPLETED
    shop.assert_settled()
    for row, values in zip(ROWS, shop.table().to_pylist(), strict=True):
        assert values["outputs"] == texts(shop, row.row)[: len(values["outputs"])]


def test_samples_of_choices_are_drawn_from_one_request(shop):
    shop.create(ROWS, choices=("a", "b", "c d"), sampling=DRAWN, vote=True)
    shop.attempt().run()
    shop.assert_settled()
    num_steps = shop.runner.num_sequences_started
    for values in shop.table().to_pylist():
        counts = Counter(values["outputs"])
        best = max(counts.values())
        likeliest = max((each for each in counts if counts[each] == best), key=values["probabilities"].__getitem__)
        assert len(values["outputs"]) == 9
        assert values["label"] == values["output"] == values["votes"][0]["answer"] == likeliest
        assert values["confidence"] == values["probabilities"][likeliest]
        assert values["agreement"] == best / 9
        assert math.isclose(sum(values["probabilities"].values()), 1)
    # A row's tree of three choices has one or two nodes; nine requests would have nine times as many.
    assert num_steps <= 2 * len(ROWS)


def test_they_are_those_that_several_requests_would_give(shop):
    choices = ("a", "b", "c d")
    shop.create(ROWS, choices=choices, sampling=DRAWN)
    shop.attempt().run()
    for values in shop.table().to_pylist():
        probabilities = [values["probabilities"][choice] for choice in choices]
        params = shop.params(values["row"], choices)
        drawn = [params.of_sample(index) for index in range(9)]
        picked = [pick_choice(probabilities, each, each.seed or 0) for each in drawn]
        assert values["outputs"] == [choices[index] for index in picked]


def test_a_vote_needs_several_answers(shop):
    with pytest.raises(SpecError, match="vote: needs several answers to each row: give n"):
        JobSpec.parse(model=str(shop.model), vote=True)

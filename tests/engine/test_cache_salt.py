"""What is cached for one salt is there for nobody else."""

import pytest

from headrace.engine.kv_cache.block_hashes import ROOT, hash_blocks, salted
from headrace.engine.request import Request

from .fakes import fake_answer, make_engine
from .running import greedy_params, run_all, token_ids

PROMPT = [token % 10 + 1 for token in range(33)]


def num_cached(engine, prompt, salt):
    request = Request("it", prompt, greedy_params(2), cache_salt=salt)
    events = run_all(engine, [request])["it"]
    assert token_ids(events) == fake_answer(request, engine.max_model_len)
    return events[0].num_cached_tokens


def test_a_prompt_is_found_by_those_with_the_same_salt():
    engine, _ = make_engine()
    salts = ["one", "other", None, ""]
    assert [num_cached(engine, PROMPT, salt) for salt in salts + salts] == [0] * 4 + [32] * 4
    engine.check()


def test_side_by_side_they_share_nothing():
    engine, _ = make_engine()
    requests = [Request(salt, PROMPT, greedy_params(4), cache_salt=salt) for salt in ("one", "other")]
    events = run_all(engine, requests)
    assert [events[each.request_id][0].num_cached_tokens for each in requests] == [0, 0]
    assert all(token_ids(events[each.request_id]) == fake_answer(each, engine.max_model_len) for each in requests)


def test_no_prompt_stands_for_a_salt():
    """A salt of a block's length is no block of tokens."""
    tokens = [int.from_bytes(b"salt", "little")] * 4
    assert salted(ROOT, "salt" * 4) not in hash_blocks(tokens, 4)


@pytest.mark.parametrize(("expected", "is_kept"), [("one", True), ("other", False)])
def test_a_prefix_is_expected_of_one_salt(expected, is_kept):
    """Nine blocks: the older prompt's four would go first, were it not for those who are to come."""
    engine, _ = make_engine(num_blocks=9)
    older, newer = PROMPT[:32], PROMPT[31::-1]
    engine.expect_prefix(older, 2, cache_salt=expected)
    for prompt in ([*older, 1], [*newer, 1], [9, *older[:27]]):
        num_cached(engine, prompt, "one")
    assert (num_cached(engine, [*older, 2], "one") == 32) is is_kept
    engine.check()

"""What happens to KV blocks that are short: swapped out, slid out of the window, or kept for who comes."""

from array import array
from functools import partial

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.kv_cache.swap import PreemptionCosts, is_swap_cheaper
from headrace.engine.request import Request

from ..fakes import FakeRunner, fake_answer, fake_engine, make_engine
from ..running import greedy_params, run_all, token_ids

PREFIX = [token % 10 + 1 for token in range(32)]


def num_cached(engine: Engine, name: str, prompt: list[int]) -> int:
    return run_all(engine, [Request(name, prompt, greedy_params(1))])[name][-1].num_cached_tokens


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_swapped_sequence_computes_nothing_again(is_caching):
    """Ten blocks: the sequences come to need fifteen."""
    engine, _ = make_engine(10, enable_prefix_caching=is_caching, swap_space_bytes=100)
    requests = [Request(str(first), [first, *PREFIX[:10]], greedy_params(30)) for first in range(1, 4)]
    events = run_all(engine, requests)
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    assert engine.stats.num_swaps == engine.stats.num_preemptions > 0
    assert engine.stats.num_computed_tokens == 3 * (11 + 29)


def test_of_a_model_with_states_a_row_begins_again_where_there_is_room_for_all_of_it():
    """Two that need 28 blocks have 20: begun up to where its own are still cached, the second had to stop again."""
    engine = fake_engine(FakeRunner(20, 8, num_states=20), EngineConfig(block_size=8), context=120)
    requests = [Request(str(first), [first, *PREFIX, *PREFIX, *PREFIX[:8]], greedy_params(39)) for first in range(1, 3)]
    events = run_all(engine, requests)
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    assert engine.stats.num_preemptions == 1


def test_what_finds_no_room_in_the_swap_space_is_computed_again():
    engine, _ = make_engine(10, enable_prefix_caching=False, swap_space_bytes=1)
    requests = [Request(str(first), [first, *PREFIX[:10]], greedy_params(30)) for first in range(1, 4)]
    events = run_all(engine, requests)
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    assert engine.stats.num_swaps == 0 < engine.stats.num_preemptions
    assert engine.stats.num_computed_tokens > 3 * (11 + 29)


def test_only_what_nobody_else_keeps_is_swapped():
    """All have 32 tokens in common; the swap space holds the one or two blocks that each has of its own."""
    engine, _ = make_engine(9, swap_space_bytes=2)
    requests = [Request(str(first), [*PREFIX, first], greedy_params(30)) for first in range(1, 4)]
    events = run_all(engine, requests)
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    assert engine.stats.num_swaps > 0


def test_an_aborted_sequence_gives_its_swap_space_back():
    engine, _ = make_engine(6, swap_space_bytes=100)
    for first in range(1, 4):
        engine.add(Request(str(first), [first, *PREFIX[:10]], greedy_params(30)))
    while not engine.stats.num_swaps:
        engine.step()
    for first in range(1, 4):
        engine.abort(str(first))
        engine.check()
    assert not engine.has_work


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes", "expected"),
    [(100, 10**8, True), (100, 10**9, False), (1, 10**5, False)],
    ids=["cheap", "many bytes", "not worth a copy"],
)
def test_blocks_are_swapped_where_that_is_cheaper(num_tokens, num_bytes, expected):
    costs = PreemptionCosts(seconds_per_token=1e-3, seconds_per_byte=1e-10, seconds_per_swap=1e-3)
    assert is_swap_cheaper(costs, num_tokens, num_bytes) == expected


@pytest.mark.parametrize("swap_space_bytes", [0, 100])
@pytest.mark.parametrize("window", [1, 2, 9, 16])
def test_under_a_window_a_sequence_outgrows_the_memory(window, swap_space_bytes):
    """Three blocks of eight tokens: the prompt alone has five."""
    engine, _ = make_engine(3, sliding_window=window, swap_space_bytes=swap_space_bytes)
    requests = [Request(str(first), [first, *PREFIX], greedy_params(25)) for first in range(1, 4)]
    events = run_all(engine, requests)
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len, window)


def test_a_window_too_large_for_the_memory_limits_the_context():
    assert make_engine(3, sliding_window=17)[0].max_model_len == 64
    assert make_engine(3, sliding_window=18)[0].max_model_len == 24


def test_under_a_window_the_last_blocks_of_a_prefix_suffice():
    """Six blocks: of the prompt's five the first two are evicted before it comes again."""
    engine, _ = make_engine(6, sliding_window=9)
    prompt = [*PREFIX, 1, 2]
    first = Request("first", prompt, greedy_params(3))
    run_all(engine, [first])
    run_all(engine, [Request("evicts", [7, 7, *PREFIX[:6]], greedy_params(9))])
    events = run_all(engine, [Request("again", prompt, greedy_params(3))])["again"]
    assert events[-1].num_cached_tokens == 32
    assert token_ids(events) == fake_answer(first, engine.max_model_len, 9)


@pytest.mark.parametrize("made", [list, partial(array, "i"), partial(array, "q")], ids=["list", "32 bits", "64 bits"])
def test_a_prefix_that_is_expected_is_evicted_last(made):
    """Nine blocks: the older prompt's four would go first, were it not for those who are to come."""
    engine, _ = make_engine(num_blocks=9)
    older, newer = PREFIX, PREFIX[::-1]
    engine.expect_prefix(made(older), 2)
    for name, prompt in (("older", older), ("newer", newer)):
        run_all(engine, [Request(name, [*prompt, 1], greedy_params(1))])
    num_cached(engine, "evicts", [9, *PREFIX[:27]])
    assert num_cached(engine, "newer", [*newer, 2]) < 32
    assert num_cached(engine, "expected", [*older, 2]) == 32
    engine.check()


@pytest.mark.parametrize("how", ["come", "aborted", "taken back"])
def test_when_all_expected_have_come_the_prefix_is_evicted_as_any_other(how):
    engine, _ = make_engine(num_blocks=9)
    older, newer = PREFIX, PREFIX[::-1]
    engine.expect_prefix(older, 2)
    run_all(engine, [Request("older", [*older, 1], greedy_params(1))])
    if how == "come":
        num_cached(engine, "second", [*older, 2])
    elif how == "aborted":
        engine.add(Request("second", [*older, 2], greedy_params(1)))
        engine.abort("second")
    else:
        engine.expect_prefix(older, -1)
    engine.check()
    num_cached(engine, "newer", [*newer, 1])
    num_cached(engine, "evicts", [9, *PREFIX[:27]])
    assert num_cached(engine, "newer", [*newer, 2]) == 32
    assert num_cached(engine, "older", [*older, 2]) < 32


def test_what_is_expected_goes_too_when_nothing_else_is_left():
    engine, _ = make_engine(num_blocks=8)
    engine.expect_prefix(PREFIX, 100)
    num_cached(engine, "first", [*PREFIX, 1])
    request = Request("long", [9] * 40, greedy_params(20))
    assert token_ids(run_all(engine, [request])["long"]) == fake_answer(request, engine.max_model_len)

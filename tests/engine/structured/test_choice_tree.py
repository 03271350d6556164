"""The tree of choices, beside an obvious way to make it; what it takes of time and memory."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.errors import InvalidRequestError
from headrace.engine.structured.choices import ChoiceTree, TokenIds, build_choice_tree

END = 0
choice_lists = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, unique=True)


def naive_tree(choices: tuple[TokenIds, ...]) -> list[Any]:
    """Nodes and routes, by looking at every beginning of every choice."""
    ended = [
        (*choice, END) if any(other[: len(choice)] == choice != other for other in choices) else choice
        for choice in choices
    ]
    followers: dict[TokenIds, dict[int, None]] = {}
    for choice in ended:
        for length, token in enumerate(choice):
            followers.setdefault(choice[:length], {})[token] = None
    nodes = sorted(((path, tuple(each)) for path, each in followers.items() if len(each) > 1), key=lambda n: len(n[0]))
    routes = [
        tuple(
            (index, children.index(choice[len(path)]))
            for index, (path, children) in enumerate(nodes)
            if choice[: len(path)] == path and len(path) < len(choice)
        )
        for choice in ended
    ]
    return [nodes, routes]


@given(choice_lists.map(tuple))
def test_it_is_the_obvious_one(choices: tuple[TokenIds, ...]) -> None:
    try:
        tree = build_choice_tree(choices, END)
    except InvalidRequestError:
        # One of them has the end where another ends.
        assert any(END in choice for choice in choices)
        return
    assert [[(node.path, node.children) for node in tree.nodes], list(tree.routes)] == naive_tree(choices)


class _Counted(int):
    """A token that counts how often it is compared."""

    num_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        _Counted.num_compared += 1
        return int.__eq__(self, other)


@pytest.mark.parametrize("shape", ["apart at once", "apart at last", "each begins the next"])
def test_many_choices_are_not_compared_with_each_other(shape: str) -> None:
    """A list of 200,000 took hours, in which its server or worker did nothing else."""
    if shape == "each begins the next":
        choices = [tuple(map(_Counted, range(2, 2 + length))) for length in range(1, 61)]
    else:
        common = [] if shape == "apart at once" else [2, 3, 4, 5]
        choices = [tuple(map(_Counted, [*common, number])) for number in range(10, 1010)]
    _Counted.num_compared = 0
    assert len(built(choices).choices) == len(choices)
    assert _Counted.num_compared < 50 * sum(map(len, choices))


class _Hashed(int):
    """A token that counts how often it is hashed."""

    num_hashed = 0

    def __hash__(self) -> int:
        _Hashed.num_hashed += 1
        return int.__hash__(self)


def test_probabilities_do_not_look_at_all_tokens_again_for_each_choice() -> None:
    """The engine's thread finds them, for each row: of 15,000 choices in 0.7 seconds."""
    tree = built([(_Hashed(number),) for number in range(100)])
    logprobs = {node: [-2.0] * len(node.children) for node in tree.nodes}
    _Hashed.num_hashed = 0
    assert len(tree.probabilities(logprobs)) == 100
    assert _Hashed.num_hashed == 0


def test_a_long_choice_takes_no_more_than_its_tokens() -> None:
    """One of 100,000 tokens took 40 GB."""
    choices = [(*range(2, 5000), last) for last in (1, 2)]
    tracemalloc.start()
    try:
        assert [len(node.path) for node in built(choices).nodes] == [4998]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def built(choices: Sequence[TokenIds]) -> ChoiceTree:
    # None that was made before.
    return build_choice_tree.__wrapped__(tuple(choices), END)

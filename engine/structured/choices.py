"""Choice-constrained answers as a tree: which tokens may follow where, and what each choice's probability is.

The probability of a choice is the product, over the points where its tokens part from another choice's, of the
model's probability of its next token among those still allowed. Tokens that only one choice can continue with count
as certain, so long choices are not punished for their length, and the probabilities of all choices sum to one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..errors import InvalidRequestError

TokenIds = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ChoiceNode:
    """A point where choices part: after the tokens `path`, one of the tokens `children` follows.

    One is equal to itself alone: as a key, which it is for each choice's probability, it takes no look at its tokens.
    """

    path: TokenIds
    children: TokenIds


@dataclass(frozen=True)
class ChoiceTree:
    """`nodes`: the parting points, shortest path first. `routes[c]`: the (node, child) pairs choice `c` takes."""

    choices: tuple[TokenIds, ...]
    nodes: tuple[ChoiceNode, ...]
    routes: tuple[tuple[tuple[int, int], ...], ...]

    def probabilities(self, logprobs: Mapping[ChoiceNode, Sequence[float]]) -> tuple[float, ...]:
        """Each choice's probability from the log-probabilities of every node's children (normalised among them)."""
        return tuple(math.exp(sum(logprobs[self.nodes[node]][child] for node, child in route)) for route in self.routes)


@lru_cache(maxsize=1024)
def build_choice_tree(choices: tuple[TokenIds, ...], end_token_id: int | None) -> ChoiceTree:
    """The tree of the given choices' token ids.

    Where one choice is the beginning of another, `end_token_id` stands for ending there. Raises
    `InvalidRequestError` when choices cannot be told apart.
    """
    if not choices or not all(choices) or len(set(choices)) != len(choices):
        raise InvalidRequestError("choices must be different, non-empty token sequences")
    ended = _ended(choices, end_token_id)
    if any(one == other[: len(one)] for one, other in pairwise(sorted(ended))):
        raise InvalidRequestError("a choice that holds the end-of-sequence token cannot be told from another")
    partings = sorted(_partings(ended), key=lambda parting: (parting.depth, parting.first))
    routes: list[list[tuple[int, int]]] = [[] for _ in ended]
    for index, parting in enumerate(partings):
        for child, followers in enumerate(parting.followers.values()):
            for choice in followers:
                routes[choice].append((index, child))
    nodes = tuple(ChoiceNode(ended[each.first][: each.depth], tuple(each.followers)) for each in partings)
    return ChoiceTree(choices, nodes, tuple(map(tuple, routes)))


def _ended(choices: tuple[TokenIds, ...], end_token_id: int | None) -> list[TokenIds]:
    """With an end where a choice is the beginning of another. In the order of all it is then that of the next one."""
    beginnings = {one for one, other in pairwise(sorted(choices)) if other[: len(one)] == one}
    if not beginnings:
        return list(choices)
    if end_token_id is None:
        raise InvalidRequestError("one choice is the beginning of another and the model has no end-of-sequence token")
    return [(*choice, end_token_id) if choice in beginnings else choice for choice in choices]


class _Parting(NamedTuple):
    """`followers`: by the token at `depth` which choices go on with it; `first`: the first choice of all of them."""

    depth: int
    first: int
    followers: dict[int, list[int]]


def _partings(choices: Sequence[TokenIds]) -> Iterator[_Parting]:
    """Where choices part, none of which is the beginning of another; each of their tokens is looked at once."""
    groups = [(0, list(range(len(choices))))]
    while groups:
        depth, group = groups.pop()
        if len(group) == 1:
            continue
        followers: dict[int, list[int]] = {}
        for choice in group:
            followers.setdefault(choices[choice][depth], []).append(choice)
        groups += [(depth + 1, each) for each in followers.values()]
        if len(followers) > 1:
            yield _Parting(depth, group[0], followers)

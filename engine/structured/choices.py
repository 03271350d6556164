"""Choice-constrained answers as a tree: which tokens may follow where, and what each choice's probability is.

The probability of a choice is the product, over the points where its tokens part from another choice's, of the
model's probability of its next token among those still allowed. Tokens that only one choice can continue with count
as certain, so long choices are not punished for their length, and the probabilities of all choices sum to one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..errors import InvalidRequestError

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class ChoiceNode:
    """A point where choices part: after the tokens `path`, one of the tokens `children` follows."""

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
    ended = tuple(_with_end(choice, choices, end_token_id) for choice in choices)
    if any(one == other[: len(one)] for one, other in pairwise(sorted(ended))):
        raise InvalidRequestError("a choice that holds the end-of-sequence token cannot be told from another")
    followers: dict[TokenIds, dict[int, None]] = {}
    for choice in ended:
        for length, token in enumerate(choice):
            followers.setdefault(choice[:length], {})[token] = None
    parting = [(path, tuple(tokens)) for path, tokens in followers.items() if len(tokens) > 1]
    nodes = tuple(ChoiceNode(path, tokens) for path, tokens in sorted(parting, key=lambda item: len(item[0])))
    return ChoiceTree(choices, nodes, tuple(_route(choice, nodes) for choice in ended))


def _with_end(choice: TokenIds, choices: tuple[TokenIds, ...], end_token_id: int | None) -> TokenIds:
    is_beginning = any(other != choice and other[: len(choice)] == choice for other in choices)
    if not is_beginning:
        return choice
    if end_token_id is None:
        raise InvalidRequestError("one choice is the beginning of another and the model has no end-of-sequence token")
    return (*choice, end_token_id)


def _route(choice: TokenIds, nodes: tuple[ChoiceNode, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (index, node.children.index(choice[len(node.path)]))
        for index, node in enumerate(nodes)
        if len(node.path) < len(choice) and choice[: len(node.path)] == node.path
    )

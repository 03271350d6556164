"""The work that engines are compared on: prompts as token ids, and how many tokens each wants. Free of torch."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

Prompts = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """Rows to generate. `shared_tokens`: the first so many tokens of a row are those of other rows as well."""

    prompts: Prompts
    max_tokens: list[int]
    shared_tokens: int = 0

    @property
    def rows(self) -> int:
        return len(self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    def distinct_prompt_tokens(self, block: int = 16) -> int:
        """Prompt tokens left to compute when what rows share, in whole blocks, is computed once."""
        seen: set[int] = set()
        total = 0
        for prompt in self.prompts:
            chain = 0
            for start in range(0, len(prompt), block):
                tokens = tuple(prompt[start : start + block])
                chain = hash((chain, tokens))
                if len(tokens) < block or chain not in seen:
                    total += len(tokens)
                seen.add(chain)
        return total


class Draw:
    """Token ids and lengths from a seed."""

    def __init__(self, seed: int | str, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=count)

    def lengths(self, low: int, high: int, count: int) -> list[int]:
        return [self._random.randint(low, high) for _ in range(count)]

    def under(self, prefixes: Iterable[list[int]], rows_each: int, own: int) -> Prompts:
        """`rows_each` rows of `own` tokens under every prefix, shuffled."""
        prompts = [prefix + self.tokens(own) for prefix in prefixes for _ in range(rows_each)]
        self._random.shuffle(prompts)
        return prompts


def _shared(draw: Draw, rows: int, shared: int, own: int, output: int) -> Workload:
    return Workload(draw.under([draw.tokens(shared)], rows, own), [output] * rows, shared)


def _nothing_shared(draw: Draw, rows: int) -> Workload:
    prompts = [draw.tokens(length) for length in draw.lengths(20, 200, rows)]
    return Workload(prompts, draw.lengths(20, 100, rows))


def _groups(draw: Draw, rows: int) -> Workload:
    return Workload(draw.under([draw.tokens(512) for _ in range(8)], rows // 8, 32), [8] * rows, 512)


def _nested(draw: Draw, rows: int) -> Workload:
    common = draw.tokens(256)
    return Workload(draw.under([common + draw.tokens(256) for _ in range(8)], rows // 8, 16), [8] * rows, 512)


@dataclass(frozen=True)
class Recipe:
    """How a workload is drawn, and how many rows it has unless told otherwise."""

    rows: int
    text: str
    build: Callable[[Draw, int], Workload]

    def draw(self, seed: int | str, vocab_size: int, rows: int | None = None) -> Workload:
        return self.build(Draw(seed, vocab_size), rows or self.rows)

    def cut(self, divisor: int) -> "Recipe":
        """The same with fewer rows, at least one for each prefix."""
        return replace(self, rows=max(self.rows // divisor, min(self.rows, 8)))


def _under_one_prefix(rows: int, shared: int, own: int, output: int) -> Recipe:
    text = f"{shared} shared + {own} own tokens → {output}"
    return Recipe(rows, text, lambda draw, count: _shared(draw, count, shared, own, output))


RECIPES = {
    "W1": _under_one_prefix(128, 512, 32, 8),
    "W2": Recipe(64, "20–200 tokens → 20–100, nothing shared", _nothing_shared),
    "W3": _under_one_prefix(64, 2048, 64, 16),
    "W4": Recipe(1, "one prompt of 128 tokens → 64", lambda draw, rows: _shared(draw, rows, 0, 128, 64)),
    "W5": Recipe(256, "8 prefixes of 512, shuffled, + 32 own tokens → 8", _groups),
    "W6": Recipe(128, "256 common, then 8 × 256, + 16 own tokens → 8", _nested),
}
# What a sweep varies → its values → the workload there.
SWEEPS = {
    "batch": {rows: _under_one_prefix(rows, 512, 32, 8) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)},
    "prefix": {shared: _under_one_prefix(64, shared, 32, 8) for shared in (0, 256, 512, 1024, 2048, 4096)},
}


def first_token_only(workload: Workload) -> Workload:
    """The same prompts with one token to generate: what it takes is the time to the first token."""
    return Workload(workload.prompts, [1] * workload.rows, workload.shared_tokens)


def gate_workload(vocab_size: int) -> Workload:
    """Few rows of every kind: shared, nested, of their own, short and long."""
    draw = Draw(1, vocab_size)
    common = draw.tokens(48)
    prompts = draw.under([common, common + draw.tokens(40), []], 6, 5)
    prompts += [draw.tokens(length) for length in draw.lengths(1, 90, 6)]
    return Workload(prompts, draw.lengths(8, 32, len(prompts)))

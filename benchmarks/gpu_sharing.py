"""From how many tokens on a shared prefix is worth computing once, for `gpu.py`: what the gate's table is to be set by.

The table is `MIN_SHARED_TOKENS` in `kernels/paged_attention/planning.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from gpu_kernels import AttentionCase, Sizes, always, never, timed
from gpu_table import Line

from headrace.kernels.paged_attention.planning import is_worth_sharing


@dataclass(frozen=True)
class SharingSizes:
    """How many sequences share how many tokens: each number of one with each of the other."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]


GPU = SharingSizes((2, 4, 8, 16, 32, 64, 256), (128, 256, 512, 1024, 2048, 8192))
DRY = SharingSizes((2,), (32, 64))


def sharing_lines(sizes: Sizes, sharing: SharingSizes) -> Iterator[Line]:
    """Decodes of so many sequences, with the prefix computed once against once for each of them."""
    for sequences, tokens in product(sharing.sequences, sharing.tokens):
        case = AttentionCase.decode(replace(sizes, batch=sequences), tokens)
        plain, shared = (timed(case.runner(sizes, gate)[0], sizes) for gate in (never, always))
        verdict = "shared" if is_worth_sharing(sequences, tokens) else "apart"
        name = f"{sequences} share {tokens}, {verdict} by the gate: times as fast as plain"
        yield Line(name, shared.median * 1e6, "us", plain.median / shared.median, spread=shared.spread)

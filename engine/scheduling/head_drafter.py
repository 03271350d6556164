"""Of whom there is a hidden state that heads can guess by. Policy only: no torch."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from .sequence import Sequence
from .speculation import Draft


class _Rows(NamedTuple):
    """Where a sequence's are among a step's, and how many tokens it had before what is drawn from the first."""

    first: int
    number: int
    num_tokens: int


class HeadDrafter:
    """Guesses of those that the last step has computed a token of, from the row that their last token is drawn from."""

    longest: int | None = None

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self._rows: dict[Sequence, _Rows] = {}

    def drafts(self, wanted: Mapping[Sequence, int], budget: int) -> dict[Sequence, Draft]:
        """Placeholders. Heads compute next to nothing: the budget does not bind them."""
        numbers = {sequence: min(number, self._num_heads) for sequence, number in wanted.items()}
        return {sequence: (0,) * number for sequence, number in numbers.items() if self._has_row(sequence)}

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """The number of its tokens tells."""

    def computed(self, ended: SequenceOf[Sequence]) -> None:
        """A step is launched whose rows are these sequences': several of one that carries guesses."""
        first: dict[Sequence, int] = {}
        for row, sequence in enumerate(ended):
            first.setdefault(sequence, row)
        numbers = Counter(ended)
        self._rows = {sequence: _Rows(row, numbers[sequence], sequence.num_tokens) for sequence, row in first.items()}

    def forget(self) -> None:
        """Another step is about to be launched."""
        self._rows = {}

    def row(self, sequence: Sequence) -> int:
        """From which its last known token was drawn."""
        rows = self._rows[sequence]
        return rows.first + len(sequence.token_ids) - 1 - rows.num_tokens

    def _has_row(self, sequence: Sequence) -> bool:
        rows = self._rows.get(sequence)
        return rows is not None and 0 <= len(sequence.token_ids) - 1 - rows.num_tokens < rows.number

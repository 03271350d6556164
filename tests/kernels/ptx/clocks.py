"""What the warps of a program know of one another, where not all of them wait together (vector clocks).

A warp's moments are its time from one wait, or signal, to the next, numbered together with those of the others. Parts
of a program are its warps; four of them together, by their products; and what each has copied beside what it did. To
know a moment of a part is to know that all is done that it did up to then.
"""

import numpy as np

from .values import Array

WARPS_TOGETHER = 4


class Clocks:
    """moments: of each warp the present one, changed in place; at first one for all, who know what was before."""

    def __init__(self, moments: Array) -> None:
        self._moments = moments
        self._num_warps = len(moments)
        self._first = self._last = int(moments.max())
        # By moment: up to which of theirs its part knows each warp, and each warp's copies.
        self._known = np.repeat(np.arange(-1, self._last)[:, None], 2 * self._num_warps, 1)
        self._products: dict[int, tuple[int, list[int]]] = {}

    def release(self, warp: int) -> Array:
        """What one learns who hears of the warp from now on."""
        known = self._all_known(warp)
        self._moments[warp] = self._new(known)
        return known

    def acquire(self, warp: int, told: Array) -> None:
        if (told > self._known[self._moments[warp]]).any():
            self._moments[warp] = self._new(np.maximum(self._all_known(warp), told))

    def products(self, group: int) -> int:
        """A moment of four warps together, which know what all of them know."""
        warps = self.warps_of(group)
        moment, present = self._products.get(group, (0, []))
        if present != self._moments[warps].tolist():
            known = [self._all_known(warp) for warp in warps]
            moment = self._new(np.min(known, 0))
            # What each does from now on is after it.
            self._moments[warps] = [self._new(each) for each in known]
            self._products[group] = moment, self._moments[warps].tolist()
        return moment

    def copies(self, warp: int) -> tuple[int, Array]:
        """A moment of the warp's copies, and what one learns who hears of them, and of nothing else the warp did."""
        told = self._known[self._moments[warp]].copy()
        moment = self._new(self._all_known(warp))
        self._moments[warp] = self._new(self._all_known(warp))
        told[self._num_warps + warp] = moment
        return moment, told

    def barrier(self) -> None:
        """All warps wait for all."""
        known = np.max([self._all_known(warp) for warp in range(self._num_warps)], 0)
        self._moments[:] = self._new(known)

    def step(self) -> int:
        """The moment after which all of the warps are from now on."""
        for warp in range(self._num_warps):
            self._moments[warp] = self._new(self._all_known(warp))
        return int(self._moments.min())

    def is_known(self, moment: int, warps: range, later: int) -> bool:
        """Whether who is at moment `later` knows that of one warp, or one that several have together."""
        # A moment that is theirs alone is over once they are past it.
        least = moment + 1 if len(warps) > 1 and moment > self._first else moment
        return all(self._known[later, warp] >= least for warp in warps)

    def are_copies_known(self, moment: int, warp: int, later: int) -> bool:
        return bool(self._known[later, self._num_warps + warp] >= moment)

    def warps_of(self, group: int) -> range:
        return range(WARPS_TOGETHER * group, min(WARPS_TOGETHER * (group + 1), self._num_warps))

    def _all_known(self, warp: int) -> Array:
        """What a warp knows, of itself too."""
        moment = self._moments[warp]
        known = self._known[moment].copy()
        known[warp] = moment
        return known

    def _new(self, known: Array) -> int:
        self._last += 1
        if self._last == len(self._known):
            self._known = np.concatenate((self._known, np.zeros_like(self._known)))
        self._known[self._last] = known
        return self._last

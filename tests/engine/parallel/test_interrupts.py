"""Ctrl-C lets a step be computed to its end."""

import os
import signal

import pytest

from headrace.engine.parallel.interrupts import interrupts_held


def test_it_comes_after_what_it_must_not_cut_short():
    done = []

    def step() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_it_nothing_happens():
    with interrupts_held():
        pass

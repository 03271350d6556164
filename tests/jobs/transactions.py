"""Which of this process's threads are in a transaction, for who must not stand still beside one that is."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from sqlalchemy import Connection

from headrace.storage.database import Database

_Begin = Callable[[Database], AbstractContextManager[Connection]]


class Transactions:
    """Of all ledgers, from when this is made."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: Counter[int] = Counter()
        self._is_shut = False
        for name in ("read", "write"):
            setattr(Database, name, self._counted(getattr(Database, name)))

    @contextmanager
    def none_open(self) -> Iterator[None]:
        """Wait until there is none, and let none begin before the end of the context."""
        with self._changed:
            self._is_shut = True
            self._changed.wait_for(lambda: not self._open.total())
        try:
            yield
        finally:
            with self._changed:
                self._is_shut = False
                self._changed.notify_all()

    def _counted(self, begin: _Begin) -> _Begin:
        @contextmanager
        def counted(database: Database) -> Iterator[Connection]:
            with self._one_more(threading.get_ident()), begin(database) as connection:
                yield connection

        return counted

    @contextmanager
    def _one_more(self, thread: int) -> Iterator[None]:
        with self._changed:
            # Who is in one already may need another to end it.
            self._changed.wait_for(lambda: not self._is_shut or self._open[thread] > 0)
            self._open[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._open[thread] -= 1
                self._changed.notify_all()

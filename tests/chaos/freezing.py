"""A worker that stands still with a part written and not committed, while others go on."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import ShardRecord

from ..jobs.conftest import wait_until

_MOST_SECONDS = 240.0


@dataclass(frozen=True)
class Frozen:
    """Who it is, and which attempt's part it was about to commit."""

    pid: int
    shard_id: str
    attempt_id: int

    @classmethod
    def parse(cls, words: list[str]) -> Self:
        return cls(int(words[0]), words[1], int(words[2]))

    def thaw_when(self, ledger: Ledger, folder: Path, is_enough: Callable[[ShardRecord, list[Path]], bool]) -> bool:
        """Let it go on once its shard, and what is left of its part in the output folder, are so: false if never."""
        process = psutil.Process(self.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it stands still", _MOST_SECONDS)
        deadline = time.monotonic() + _MOST_SECONDS
        try:
            while not (came := is_enough(self._shard(ledger), self._written(folder))) and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGCONT)
        return came

    def _written(self, folder: Path) -> list[Path]:
        # The next attempt removes it once it knows what is committed.
        return list(folder.glob(f".part-*-{self.attempt_id:02d}-*"))

    def _shard(self, ledger: Ledger) -> ShardRecord:
        shards = ledger.shards(self.shard_id.partition("/")[0])
        return next(shard for shard in shards if shard.id == self.shard_id)

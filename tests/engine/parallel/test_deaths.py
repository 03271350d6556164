"""What a process does about the death of a rank, and what it leaves alone. Here without any: they take seconds."""

import os
import subprocess
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineDeadError
from headrace.engine.parallel import rank_processes
from headrace.engine.parallel.messages import Failed
from headrace.engine.parallel.rank_processes import RankProcesses, _Rank
from headrace.engine.sharding import ranks

from .small_models import write_model


class Stream:
    """`is_idle`: the GPU has done all that was asked of it."""

    is_idle = True

    def query(self) -> bool:
        return self.is_idle


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: stream)
    return stream


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[RankProcesses]:
    model = ModelConfig.from_pretrained(write_model(tmp_path))
    processes = RankProcesses(model, EngineConfig(device="cuda"))
    yield processes
    processes.close()
    assert not Path(processes.rendezvous).parent.exists()


@pytest.mark.parametrize(
    ("have_begun", "is_computing", "is_idle", "ends"),
    [
        (False, False, False, False),
        (True, False, True, False),
        (True, False, False, True),
        (True, True, True, True),
    ],
    ids=["while weights are read", "at rest", "while a step is read", "while one is launched"],
)
def test_it_ends_itself_only_where_it_would_wait_for_ever(
    have_begun, is_computing, is_idle, ends, processes, stream, monkeypatch
):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(rank_processes, "_NOTICE_SECONDS", 0.0)
    if have_begun:
        processes.meet()
    processes.is_computing, stream.is_idle = is_computing, is_idle
    processes._die("rank 1 is gone")
    assert ended == [1] * ends
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        processes.meet()


def test_the_one_that_is_gone_is_named_rather_than_one_that_fails_for_want_of_it(processes, monkeypatch):
    monkeypatch.setattr(rank_processes, "_NOTICE_SECONDS", 0.0)
    (from_one, one), (from_other, other) = Pipe(), Pipe()
    one.send(Failed("connection reset by peer"))
    other.close()
    ended = subprocess.Popen(["false"])
    processes._watch([_Rank(1, ended, from_one), _Rank(2, ended, from_other)])
    with pytest.raises(EngineDeadError, match=r"rank 2 \(process \d+\) ended with status 1"):
        processes.meet()


def test_a_fork_of_the_process_leaves_its_ranks_alone(processes, monkeypatch):
    with monkeypatch.context() as in_the_fork:
        in_the_fork.setattr(os, "getpid", lambda: -1)
        processes.close()
    assert Path(processes.rendezvous).parent.exists()
    processes.meet()


def test_nobody_waits_for_the_rendezvous_once_they_have_met(tmp_path, monkeypatch):
    """NCCL looks there for as long as its group lives, which may be longer than the ranks."""
    new_group, stores = ranks._new_group, []

    def noted(store: Any, *arguments: Any) -> Any:
        stores.append(store)
        return new_group(store, *arguments)

    monkeypatch.setattr(ranks, "_new_group", noted)
    ranks.ProcessRanks(0, 1, torch.device("cpu"), str(tmp_path / "rendezvous"), lambda: None).meet()
    assert [store.timeout.total_seconds() for store in stores] == [1]

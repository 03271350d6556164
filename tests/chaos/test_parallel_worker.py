"""A worker whose model two processes share ends with either of them, so that another takes its rows."""

import psutil
import pytest

from ..jobs.conftest import wait_until
from ..jobs.running import MODEL, environment, processes_of, started
from .site import LONG_ROWS


def test_a_worker_ends_with_a_rank_that_is_killed(num_rows, tmp_path):
    if num_rows < LONG_ROWS:
        pytest.skip(f"torch is imported three times: with --chaos-rows {LONG_ROWS}")
    folder, data_dir = tmp_path / "worker", tmp_path / "data"
    err = folder / "err"
    arguments = ["worker", "--model", str(MODEL), "-tp", "2", "--max-model-len", "64", "--max-num-seqs", "4"]
    with started(arguments, environment(data_dir, OMP_NUM_THREADS="1"), folder) as worker:
        wait_until(lambda: "serving" in err.read_text() or worker.poll() is not None, "the worker serves")
        (rank,) = [child for child in psutil.Process(worker.pid).children() if "rank_process" in str(child.cmdline())]
        rank.kill()
        assert worker.wait(60) == 1
    assert f"headrace worker: rank 1 (process {rank.pid}) was killed by SIGKILL" in err.read_text()
    wait_until(lambda: not processes_of(data_dir), "nothing is left")

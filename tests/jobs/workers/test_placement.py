"""Which GPUs, or how many threads, each of several workers of a host has."""

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from headrace.engine.errors import ConfigError
from headrace.jobs.workers import placement
from headrace.jobs.workers.placement import Devices, gpu_names, place

IDS = ["GPU-8932f937-d72c-4106", "GPU-5a1e", "GPU-77"]


@pytest.mark.parametrize(
    ("visible", "num_found", "names"),
    [
        (None, 3, ["0", "1", "2"]),
        (None, 0, []),
        ("", 0, []),
        ("-1", 0, []),
        ("2,0,3", 3, ["2", "0", "3"]),
        (" 2 , 0 ", 2, ["2", "0"]),
        # CUDA reads no further than a name of no GPU.
        ("1,7,2", 1, ["1"]),
        ("0,-1,2", 1, ["0"]),
        (",".join(IDS), 3, IDS),
        # One process finds one of them, whatever it is told.
        ("MIG-a/1/0,MIG-b/2/0", 1, ["MIG-a/1/0", "MIG-b/2/0"]),
        ("MIG-a,,MIG-b", 1, ["MIG-a"]),
        ("MIG-a,MIG-b", 0, []),
    ],
)
def test_gpus_are_called_as_the_environment_calls_them(visible: str | None, num_found: int, names: list[str]) -> None:
    assert gpu_names(visible, num_found) == names


@pytest.mark.parametrize("num_gpus", range(1, 10))
def test_each_worker_has_gpus_of_its_own_in_order(num_gpus: int) -> None:
    gpus = [f"GPU-{number}" for number in range(num_gpus)]
    for num_workers, gpus_each in product(range(2, 6), range(1, 5)):
        needed = num_workers * gpus_each
        if needed > num_gpus:
            with pytest.raises(ConfigError, match=f"={num_workers} needs {needed} GPUs.* and there are {num_gpus}$"):
                Devices(gpus, 8).environments(num_workers, gpus_each)
            continue
        places = Devices(gpus, 8).environments(num_workers, gpus_each)
        parts = [place["CUDA_VISIBLE_DEVICES"].split(",") for place in places]
        assert [len(part) for part in parts] == [gpus_each] * num_workers
        assert [gpu for part in parts for gpu in part] == gpus[:needed]
        assert {name for place in places for name in place} == {"CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(("num_threads", "num_workers", "each"), [(8, 2, 4), (8, 3, 2), (2, 2, 1), (1, 4, 1)])
def test_without_gpus_workers_share_the_cores(num_threads: int, num_workers: int, each: int) -> None:
    # As processes that share a model do: these divide it once more.
    for gpus_each in (1, 2):
        places = Devices([], num_threads, num_cores=4).environments(num_workers, gpus_each)
        assert places == [{"OMP_NUM_THREADS": str(each)}] * num_workers


@pytest.mark.parametrize(("num_threads", "num_cores"), [(4, 1), (1, 4)])
def test_without_gpus_there_are_no_more_workers_than_cores(num_threads: int, num_cores: int) -> None:
    """Nor than threads, where torch is told to have more."""
    devices = Devices([], num_threads, num_cores)
    assert len(devices.environments(4, 1)) == 4
    with pytest.raises(ConfigError, match=r"^data_parallel_size=5 is more than the 4 cores .*: torch finds no GPU$"):
        devices.environments(5, 1)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a shell script in Python's place."""

    def replace(script: str) -> None:
        path = tmp_path / "python.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def test_one_worker_has_what_there_is(program: Callable[[str], None]) -> None:
    program("exit 1")
    assert place(1, 8) == [{}]


def test_torch_is_asked(program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1,0")
    program("echo 'what a library says'; echo '4 16'")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in place(2, 2)] == ["5,3", "1,0"]
    words = "data_parallel_size=3 needs 6 GPUs, 2 for each worker, and there are 4"
    with pytest.raises(ConfigError, match=f"^{words}$"):
        place(3, 2)
    program("echo Traceback >&2; echo 'ImportError: libcudart.so.12' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"^torch cannot be asked for .*: ImportError: libcudart\.so\.12$"):
        place(2, 1)


def test_gpus_that_torch_does_not_find_are_told_of(
    program: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program("echo '0 6'")
    for driver, lines in ((tmp_path / "none", []), (tmp_path, ["3 workers share the cores"])):
        monkeypatch.setattr(placement, "_DRIVER_FILE", driver)
        assert place(3, 1) == [{"OMP_NUM_THREADS": "2"}] * 3
        assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == lines

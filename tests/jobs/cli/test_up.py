"""`headrace up`: one command, and what is left when it ends."""

import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil

from ...engine.lora.adapters import save_adapter
from ..models import write_model_folder
from ..running import MODEL, assert_refused, environment, processes_of, started, write_lines


def worker_of(up: int) -> psutil.Process | None:
    # One that has just been killed is a zombie, or gone while it is looked at.
    for child in psutil.Process(up).children():
        with suppress(psutil.NoSuchProcess):
            if "worker" in child.cmdline():
                return child
    return None


def test_it_answers_survives_its_worker_and_ends(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    data_dir = tmp_path / "data"
    command = ["up", "--model", str(MODEL), "--port", "0", "--dtype", "float32", "--max-num-seqs", "8"]
    command += ["--allowed-origins", "https://a.example,https://b.example"]
    with started(command, environment(data_dir, HEADRACE_ALLOWED_ORIGINS="https://c.example"), tmp_path) as up:
        out, err = tmp_path / "out", tmp_path / "err"
        wait_until(lambda: "listening on" in out.read_text() or up.poll() is not None, "it listens", 120)
        assert up.poll() is None, err.read_text()
        url = out.read_text().splitlines()[0].removeprefix("headrace: listening on ")
        early = httpx2.post(f"{url}/v1/completions", json={"model": "model", "prompt": "Hello"}, timeout=60)
        # It may be ready by now.
        assert early.status_code == 200 or early.json()["error"]["code"] == "model_loading"
        wait_until(lambda: "try it:\n" in out.read_text() or up.poll() is not None, "it is ready", 120)
        assert up.poll() is None, err.read_text()
        lines = out.read_text().splitlines()
        assert lines[1] == "headrace: model is ready"
        curl = shlex.split(lines[-1])
        answer = httpx2.post(curl[1], content=curl[-1], headers={"content-type": "application/json"}, timeout=60)
        assert answer.raise_for_status().json()["choices"][0]["message"]["content"]
        assert httpx2.get(f"{url}/v1/models", timeout=60).json()["data"][0]["dtype"] == "float32"
        pages = [httpx2.get(f"{url}/health", headers={"Origin": f"https://{page}.example"}) for page in "abc"]
        assert ["access-control-allow-origin" in page.headers for page in pages] == [True, True, False]

        first = worker_of(up.pid)
        assert first is not None
        assert "--enable-prefix-caching" in first.cmdline()
        assert "--max-num-seqs=8" in first.cmdline()
        first.kill()
        wait_until(lambda: (worker_of(up.pid) or first).pid != first.pid, "another worker runs")
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0
    assert all(line.startswith(("model | ", "api | ")) for line in err.read_text().splitlines())
    wait_until(lambda: not processes_of(data_dir), "all its processes have ended")


def test_a_worker_that_can_not_run_ends_it(tmp_path: Path) -> None:
    # The server needs no weights.
    model = write_model_folder(tmp_path / "bare")
    command = ["up", "--model", str(model), "--port", "0", "--data-parallel-size", "2"]
    with started(command, environment(tmp_path / "data"), tmp_path) as up:
        try:
            status = up.wait(90)
        except subprocess.TimeoutExpired:
            status = None
    error = (tmp_path / "err").read_text()
    assert status == 1, error
    assert error.splitlines()[-1].startswith("headrace: the worker refused to start: ")
    for number in (1, 2):
        assert f"bare #{number} | headrace: " in error


def test_an_adapter_that_no_worker_could_hold_is_refused_at_once(headrace, tmp_path: Path) -> None:
    """As the worker's own command does, before either loads anything."""
    adapter = save_adapter(MODEL, tmp_path / "adapter", rank=17)
    served = ("--model", MODEL, "--lora-modules", f"x={adapter}")
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "a"})
    asked = (rows, "--model", MODEL, "--lora", f"x={adapter}", "--output", tmp_path / "out")
    for command in (("up", "--port", "0", *served), ("worker", *served), ("run", *asked)):
        result = headrace(tmp_path / "data", *command)
        assert_refused(result, "r=17, above --max-lora-rank=16: raise --max-lora-rank to 17")
    queued = headrace(tmp_path / "data", "submit", *asked)
    assert queued.status == 0, queued.err
    assert "--max-lora-rank 17" in queued.err

"""Several workers by one option: what commands say of them, and how they end. A shell script is in Python's place."""

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ..running import MODEL, assert_refused, write_lines

# Torch is asked for GPUs, and finds two.
TWO_GPUS = 'if [ "$2" = -c ]; then echo 2 8; exit; fi\n'


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    def replace(script: str) -> None:
        path = tmp_path / "python.sh"
        path.write_text(f"#!/bin/sh\n{TWO_GPUS}{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")

    return replace


@pytest.mark.parametrize("command", ["run", "run-batch", "up", "worker"])
def test_too_few_gpus_are_refused(program, headrace, few, tmp_path, command):
    program("exit 1")
    output = tmp_path / "out"
    arguments = {
        "run": [few, "--prompt", "{text}", "--output", output],
        "run-batch": ["-i", few, "-o", output],
        "up": ["--port", "0"],
        "worker": [],
    }[command]
    done = headrace(tmp_path / "data", command, *arguments, "--model", MODEL, "-dp", "3")
    assert_refused(done, "headrace: --data-parallel-size=3 needs 3 GPUs, and there are 2")
    done = headrace(tmp_path / "data", command, *arguments, "--model", MODEL, "-dp", "2", "-tp", "2", "-pp", "2")
    assert_refused(done, "--data-parallel-size=2 needs 8 GPUs, 4 for each worker, and there are 2")
    assert not output.exists()
    assert not (tmp_path / "data").exists()


def test_workers_run_until_they_are_told_to_stop(program, headrace, tmp_path):
    tell = f"echo >> {tmp_path}/said; [ $(wc -l < {tmp_path}/said) = 2 ] && kill -TERM $PPID"
    program(f'echo "on $CUDA_VISIBLE_DEVICES in $HEADRACE_DATA_DIR with $*"; {tell}; exec sleep 600')
    options = ["--model", MODEL, "--dtype", "float32", "--max-num-seqs", "7"]
    done = headrace(tmp_path / "data", "worker", *options, "--data-parallel-size", "2")
    assert (done.status, done.out) == (0, "")
    first, second = sorted(done.err.splitlines())
    assert first.startswith(
        f"worker #1 | on GPU-b in {tmp_path / 'data'} with -P -m headrace.jobs.cli worker --model {MODEL} "
    )
    assert second.startswith("worker #2 | on GPU-a in ")
    assert "--dtype float32" in first
    assert "--max-num-seqs=7 " in first
    assert "--data-parallel-size" not in first


@pytest.mark.timeout(60)
def test_a_signal_that_another_thread_is_given_ends_them_too(program, headrace, tmp_path, wait_until):
    program(f"touch {tmp_path}/up; exec sleep 600")

    def tell() -> None:
        wait_until((tmp_path / "up").exists, "a worker is there")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread = threading.Thread(target=tell)
    thread.start()
    assert headrace(tmp_path / "data", "worker", "--model", MODEL, "-dp", "2").status == 0
    thread.join()


def test_workers_that_cannot_run_end_it(program, headrace, tmp_path, caplog):
    program("echo 'headrace: no such model'; exit 2")
    done = headrace(tmp_path / "data", "worker", "--model", MODEL, "-dp", "2")
    assert done.status == 2
    *lines, last = [line for line in done.err.splitlines() if " ERROR " not in line]
    assert sorted(lines) == [f"worker #{number} | headrace: no such model" for number in (1, 2)]
    assert last == "headrace: no such model"
    # It is not the end while there is another.
    (said,) = [record.getMessage() for record in caplog.records if record.name.endswith("kept_workers")]
    assert said in [f"worker #{number} refuses to run: it is not started again" for number in (1, 2)]


@pytest.mark.parametrize("command", ["run", "run-batch"])
def test_a_job_is_cut_for_workers_that_say_where_they_are(program, headrace, tmp_path, command):
    is_worker = 'case "$*" in *" worker "*)'
    program(f'{is_worker} echo on $CUDA_VISIBLE_DEVICES; exit 2;; *) exec {sys.executable} "$@";; esac')
    body = {"model": MODEL.name, "messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 1}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    rows = write_lines(tmp_path / "in.jsonl", *({"custom_id": str(number), **request} for number in range(100)))
    source = [rows, "--prompt", "{custom_id}", "--output"] if command == "run" else ["-i", rows, "-o"]
    options = ["--model", MODEL, "-dp", "2"]
    done = headrace(tmp_path / "data", command, *source, tmp_path / "out", *options, HEADRACE_SHARD_ROWS="")
    assert done.status == 1
    assert "100 rows in 4 shards" in done.err
    said = "none of 2 workers is left: the first refused to start: on GPU-b"
    assert done.err.splitlines()[-1].startswith(f"headrace: {said}")

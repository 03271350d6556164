"""Headrace as its users start it: the tickets model, a worker that serves it, the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/tickets/model"
LABELS = ("billing", "shipping", "refund", "account", "technical", "cancel", "product", "feedback")
COMMAND = (sys.executable, "-P", "-m", "headrace.jobs.cli")
# Small shards and quick flushes, so that a short run has many parts. Receivers of webhooks are on this host.
SETTINGS = {
    "HEADRACE_SHARD_ROWS": "32",
    "HEADRACE_FLUSH_SECONDS": "0.2",
    "HEADRACE_LEASE_SECONDS": "2",
    "HEADRACE_ALLOW_PRIVATE_ADDRESSES": "true",
}


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str


def environment(data_dir: Path, **more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**ours, **SETTINGS, "HEADRACE_DATA_DIR": str(data_dir), **more}


def write_tickets(path: Path, rows: int) -> Path:
    generate = (sys.executable, ROOT / "examples/tickets/generate.py", "--rows", str(rows), "--output", path)
    subprocess.run(generate, check=True)
    return path


def label_arguments(tickets: Path, output: Path) -> list[str]:
    """The command of the demo."""
    system = f"@{ROOT / 'examples/tickets/system.txt'}"
    options = ["--prompt", "{text}", "--system", system, "--choices", ",".join(LABELS)]
    return ["run", str(tickets), "--model", str(MODEL), *options, "--output", str(output)]


def write_lines(path: Path, *lines: Any) -> Path:
    """A file of these lines: texts as they are, anything else as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def write_unreadable_parquet(path: Path) -> Path:
    """Parquet whose first rows can be read and whose third row group can not."""
    texts = [f"{number:01000}" for number in range(400)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, use_dictionary=False, compression=None)
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 200)
    return path


def results(folder: Path) -> pa.Table:
    """A data set's rows, in the input's order."""
    return ds.dataset(sorted(map(str, folder.glob("*.parquet")))).to_table().sort_by("row")


def assert_refused(result: Result, *words: str) -> None:
    """One line on standard error that has these words; exit status 2; nothing on standard output."""
    assert result.status == 2, result
    assert result.out == ""
    assert result.err.startswith("headrace: "), result.err
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err, (word, result.err)


def listed_jobs(listing: Result) -> list[str]:
    """The ids in what `headrace jobs` prints, whose counts may change from one moment to the next."""
    return [line.split()[0] for line in listing.out.splitlines()]


@contextmanager
def started(arguments: list[str], env: Mapping[str, str], folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A command in a process group of its own; its output goes to `folder`/out and `folder`/err."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen([*COMMAND, *arguments], env=env, stdout=out, stderr=err, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def processes_of(data_dir: Path) -> list[psutil.Process]:
    """All processes that use this data folder, but this one: none is to be left after a run."""
    return [process for process in psutil.process_iter() if _belongs_to(process, data_dir)]


def _belongs_to(process: psutil.Process, data_dir: Path) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get("HEADRACE_DATA_DIR") == str(data_dir):
            return True
        # Valkey writes its title over its environment, but works in its folder; its supervisor is told of that.
        return any(Path(place).is_relative_to(data_dir) for place in (process.cwd(), *process.cmdline()))
    except psutil.Error:
        return False

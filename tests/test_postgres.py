"""What a killed test run leaves of its PostgreSQL is removed by the next one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from .postgres import _with_parameters, remove_abandoned


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_what_belongs_to_ended_processes_goes(temporary: Path, ended_pid: int) -> None:
    names = [f"headrace-postgres-{pid}-x" for pid in (ended_pid, os.getpid())]
    abandoned, ours = (temporary / name for name in names)
    waits = "import time; print(flush=True); time.sleep(600)"
    servers = []
    for folder in (abandoned, ours):
        (folder / "data").mkdir(parents=True)
        command = [sys.executable, "-c", waits, "-D", str(folder / "data")]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    try:
        for server in servers:
            server.stdout.readline()
        remove_abandoned()
        assert servers[0].poll() is not None
        assert servers[1].poll() is None
        assert list(temporary.iterdir()) == [ours]
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_a_schema_s_url_keeps_the_options_that_are_there() -> None:
    given = "postgresql://me@/db?host=%2Ftmp%2Fx&options=-cwork_mem%3D1MB%20-cjit%3Doff&application_name=mine"
    parameters = conninfo_to_dict(_with_parameters(given, application_name="test", options="-csearch_path=s"))
    assert parameters["options"] == "-cwork_mem=1MB -cjit=off -csearch_path=s"
    assert (parameters["host"], parameters["application_name"], parameters["user"]) == ("/tmp/x", "test", "me")

"""A command imports what it needs: users wait for the rest."""

import subprocess
import sys

import pytest

from headrace.jobs.cli import main
from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.settings import Settings

_PRINT_MODULES = """
import atexit, sys
atexit.register(lambda: print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr))
sys.argv[0] = "headrace"
from headrace.jobs.cli import main
main()
"""
# What takes long to import; torch takes longest.
_LARGE = {"torch", "numpy", "pyarrow", "sqlalchemy", "alembic", "pydantic", "redis", "celery", "kombu", "fastapi"}
_LARGE |= {"httpx2", "rich", "tokenizers", "grpc"}


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--version"], set()),
        (["jobs"], {"sqlalchemy", "pydantic"}),
        (["keys", "list"], {"sqlalchemy", "pydantic"}),
        (["submit", "--help"], _LARGE - {"torch", "fastapi", "alembic", "grpc"}),
    ],
    ids=["version", "jobs", "keys", "submit"],
)
def test_it_imports_no_more_than_it_needs(arguments, needed, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_DATA_DIR", str(tmp_path))
    with open_ledger(Settings.from_environment()):
        # The first one makes the tables, which takes Alembic.
        pass
    command = [sys.executable, "-c", _PRINT_MODULES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert _LARGE & set(done.stderr.split()) <= needed


def test_a_misspelt_command_is_told_of_those_there_are(headrace, tmp_path):
    result = headrace(tmp_path, "cancle")
    assert result.status == 2
    assert "Did you mean" in result.err
    assert "cancel" in result.err


@pytest.mark.parametrize("arguments", [["--help"], [], ["--help", "jobs"]], ids=["help", "nothing", "help first"])
def test_the_help_names_all_commands(arguments, headrace, tmp_path):
    result = headrace(tmp_path, *arguments)
    assert result.status == 0
    for name in ("run", "jobs", "verify", "priority", "up", "keys", "tenants"):
        assert f"\n  {name} " in result.out


def test_ctrl_c_while_it_still_imports_ends_it_without_a_traceback(monkeypatch):
    class Interrupting:
        def find_spec(self, name, *_):
            if name == "headrace.jobs.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "headrace.jobs.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130

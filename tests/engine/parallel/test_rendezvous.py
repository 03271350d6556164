"""Where ranks meet is gone with them, also when nobody could take it away."""

import os
import subprocess
import sys
import tempfile

from headrace.engine.parallel.rendezvous import Rendezvous

LONG_AGO = 1_000_000_000


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used, new = Rendezvous(), tmp_path / "headrace-ranks-just-made"
    left = tmp_path / "headrace-ranks-of-somebody-killed"
    for folder in (left, new):
        folder.mkdir()
    (left / "rendezvous").touch()
    for folder in (used.folder, left):
        os.utime(folder, (LONG_AGO, LONG_AGO))
    other = Rendezvous()
    assert set(tmp_path.iterdir()) == {used.folder, new, other.folder}
    for rendezvous in (used, other, other):
        rendezvous.remove()
    assert set(tmp_path.iterdir()) == {new}


def test_one_that_was_killed_holds_its_folder_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """
import os, signal, tempfile
from headrace.engine.parallel.rendezvous import Rendezvous
tempfile.tempdir = os.getcwd()
place = Rendezvous()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    (left,) = tmp_path.iterdir()
    os.utime(left, (LONG_AGO, LONG_AGO))
    Rendezvous().remove()
    assert not list(tmp_path.iterdir())

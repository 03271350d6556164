"""A crew that ends by itself ends the test."""

import os
import subprocess
import threading

import pytest

from .crew import CrewEnded, running_crew


def test_a_crew_that_ends_by_itself_fails_what_waits(tmp_path):
    def wait() -> None:
        with running_crew(["json.tool", "/nowhere/its-last-words"], os.environ, subprocess.DEVNULL, tmp_path / "log"):
            assert threading.Event().wait(60), "nobody told"

    with pytest.raises(CrewEnded, match="its-last-words"):
        wait()

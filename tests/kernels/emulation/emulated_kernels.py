"""A plugin of pytest: the kernels of its session are those of the library that HEADRACE_TESTS_LIBRARY names."""

import os
from pathlib import Path

import pytest

from headrace.kernels import native


def pytest_configure() -> None:
    pytest.MonkeyPatch().setattr(native, "_library_file", lambda: Path(os.environ["HEADRACE_TESTS_LIBRARY"]))

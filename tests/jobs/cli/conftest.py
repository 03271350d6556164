"""What the tests of the command line share: being refused."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ..running import MODEL, assert_refused


@pytest.fixture
def refused(served, headrace, few, tmp_path) -> Callable[..., None]:
    """Runs tickets with other arguments, and expects to be refused without a trace in the file system."""

    def run(*more: str | Path, words: Sequence[str], input: Path = few, model: Path = MODEL, prompt="{text}") -> None:
        output = tmp_path / "out"
        required = ["run", input, "--model", model, "--output", output]
        assert_refused(headrace(served, *required, *(["--prompt", prompt] if prompt else []), *more), *words)
        assert not output.exists()

    return run

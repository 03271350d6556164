"""`--device cuda` runs the Triton kernels, and every engine that is not told where, on a GPU.

Without it the kernels run in Triton's interpreter and engines on the CPU, on any machine.
"""

import gc
import os
import runpy
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, settings

from .shelf import Shelf

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# pytest-xdist's workers do not see the command line, and inherit this.
if "PYTEST_XDIST_WORKER" not in os.environ and not {"cuda", "--device=cuda"} & set(sys.argv):
    # Before anything imports triton, which reads it then; as transformers does, in a conftest below this one.
    # Where a GPU is emulated the kernels are compiled: see kernels/ptx.
    os.environ["TRITON_INTERPRET"] = "0" if "HEADRACE_TESTS_CAPABILITY" in os.environ else "1"
    # Where there is a GPU, an engine would take it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# The same examples everywhere, however slow the machine; `--hypothesis-profile default` draws others.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        # The cores are shared by the workers, who inherit this, and by what these start.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # In the background of a shell it is ignored, which the programs that tests interrupt would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _triton_interpreter("interpret_triton")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes that they have started."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long in one piece: not at the end, where the other workers would wait for it."""
    long = ("test_house.py", "test_triton_compiles.py", "test_on_emulated_gpu.py")
    items.sort(key=lambda item: item.path.name not in long)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the tests' modules import stays: nothing for the garbage collector to look at again and again.

    Nor at the end, which would take seconds.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
            _triton_interpreter("hasten_interpreter")


def _triton_interpreter(name: str) -> None:
    runpy.run_path(str(BENCHMARKS / "triton_interpreter.py"))[name]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the Triton kernels run")
    parser.addoption("--chaos-seeds", default="2", help="which jobs tests/chaos disturbs: so many, or FIRST:END")
    parser.addoption("--compile-kernels", action="store_true", help="all Triton kernels, also those in compiled.json")
    parser.addoption("--chaos-rows", type=int, default=320, help="how long these jobs are")


@pytest.fixture(scope="session", autouse=True)
def _no_pandas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The processes that tests start have no pandas, as our users' need not: pyarrow imports it where it is there."""
    folder = tmp_path_factory.mktemp("no_pandas")
    (folder / "pandas.py").write_text('raise ImportError("not installed")\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store without buckets, which this process knows as shelf://."""
    fsspec.register_implementation(Shelf.protocol, Shelf)
    monkeypatch.setenv("SHELF_ROOT", str(tmp_path / "shelf"))
    (tmp_path / "shelf").mkdir()

"""Small tensors: one thread is the faster. Triton's kernels are tested in the dtypes that are right where they run."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_numbers(device: torch.device) -> None:
    """Whichever tests came before: a tolerance is met by all numbers but a few."""
    # For devices that there are not torch keeps from where they were to be seeded, which takes it a millisecond.
    (torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed)(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "triton_dtype" in metafunc.fixturenames:
        # The interpreter's bfloat16 arithmetic is wrong.
        is_compiled = metafunc.config.getoption("--device") == "cuda" or "HEADRACE_TESTS_CAPABILITY" in os.environ
        dtypes = [torch.float32, torch.bfloat16 if is_compiled else torch.float16]
        metafunc.parametrize("triton_dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _checked_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter fails where a kernel touches what is not its tensors', or a program what another writes."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        from ..engine.execution.simulated_gpu.triton_launches import check_launches

        check_launches(monkeypatch)


@pytest.fixture
def _nan_filled_outputs() -> Iterator[None]:
    """What a kernel allocates and leaves unwritten is NaN."""
    # Some references have no deterministic way on a GPU. `use_deterministic_algorithms` would import torch's compiler.
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")

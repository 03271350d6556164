"""A plugin of pytest: Triton's kernels are compiled for a GPU, and what they compile to is emulated on the CPU.

HEADRACE_TESTS_CAPABILITY says for which: 90 for Hopper, 80 for an A100. The tests' conftest.py leaves Triton's
interpreter out where it is set. `python -m pytest -p ptx.plugin`, with this folder's parent in PYTHONPATH.
"""

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime.jit import JITFunction

from headrace.kernels import device, triton_checks

from .compiling import compiled, signature_of
from .launch import launch
from .program import Program

CAPABILITY = int(os.environ["HEADRACE_TESTS_CAPABILITY"])
_SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}
# Triton's own, for kernels that ask for memory beside their tensors; ours do not.
_SCRATCH = [np.uint64(0), np.uint64(0)]

# They look into Triton's interpreter, or for a GPU.
_TESTS_OF_OTHERS = {
    "test_a_compiled_kernel_wants_a_gpu",
    "test_outputs_are_read_many_at_once_only_where_all_parts_let_them",
}

_programs: dict[object, tuple[Program, int]] = {}
_launches: Counter[str] = Counter()


def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of a launch."""
    names = [parameter.name for parameter in kernel.params]
    defaults = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
    given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    arguments = defaults | given
    options = {name: value for name, value in kwargs.items() if name not in names}
    signature = signature_of(kernel, arguments)
    key = kernel, signature.key, tuple(options.items())
    if key not in _programs:
        _programs[key] = compiled(kernel, signature, CAPABILITY, options)
    program, shared_bytes = _programs[key]
    x, y, z = (*(grid(arguments) if callable(grid) else grid), 1, 1)[:3]
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    launch(program, [*signature.values, *_SCRATCH], (x, y, z), shared_bytes, tensors)
    _launches[kernel.fn.__name__] += 1


def pytest_configure() -> None:
    """Before the kernels' wrappers are imported, which look for a GPU."""
    patch = pytest.MonkeyPatch()
    patch.setattr(JITFunction, "run", run)
    patch.setattr(triton_checks, "check_launch", lambda name, tensor, kernel: None)
    patch.setattr(device, "_INTERPRETED_SHARED_BYTES", _SHARED_KIB[CAPABILITY] * 1024)
    patch.setattr(device, "_INTERPRETED_CAPABILITY", divmod(CAPABILITY, 10))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.partition("[")[0] in _TESTS_OF_OTHERS:
            item.add_marker(pytest.mark.skip(reason="is of Triton's interpreter, or of a GPU that is not emulated"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    launches = ", ".join(f"{name} {count}" for name, count in sorted(_launches.items()))
    terminalreporter.write_line(f"emulated for sm_{CAPABILITY}: {launches}")

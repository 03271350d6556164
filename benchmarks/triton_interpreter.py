"""Triton's interpreter, in which its kernels run on a CPU: for dry runs, and for the tests."""

import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any


def interpret_triton() -> None:
    """Have all kernels interpreted; to be called before triton, if it is there, is imported: it looks then."""
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        _mend_interpreter()


def _mend_interpreter() -> None:
    """Triton before 3.7 takes arrays of one number for numbers, which NumPy from 2.4 on does not."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = mended

"""Lets torchvision be imported beside a torch for CPUs alone, in vLLM's environment: it is never called there.

vLLM imports it for models that may read images, and its published wheel is built for CUDA's torch: what is compiled in
it does not load, and its import fails where the operators are looked for. So they are declared, without any code.
`install.sh` has this imported when Python starts.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OPERATORS = ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")

# Its operators are gone when a library is.
_KEPT: list[object] = []


class _Declaring(MetaPathFinder):
    """Finds nothing; when torchvision is looked for, torch is told of its operators."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            library: Any = import_module("torch.library").Library("torchvision", "DEF")
            for name in _OPERATORS:
                library.define(f"{name}(Tensor a) -> Tensor")
                library.define(f"_{name}_backward(Tensor a) -> Tensor")
            _KEPT.append(library)
        return None


sys.meta_path.insert(0, _Declaring())

"""How setuptools compiles the kernels: up to four files at a time. Named in `pyproject.toml`; nothing imports it."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class BuildSideBySide(build_ext):  # type: ignore[misc]
    """`build_ext`, which by itself compiles an extension's files one after the other."""

    def build_extension(self, ext: Extension) -> None:
        compile_files = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return list(chain.from_iterable(objects))

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)

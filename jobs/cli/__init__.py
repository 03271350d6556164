"""The command line: `headrace run`, `jobs`, `show`, `results`, `worker`, `serve`."""

from .app import main

__all__ = ["main"]

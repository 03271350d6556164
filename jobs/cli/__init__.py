"""The command line: `headrace run`, `jobs`, `show`, `results`, `worker`, `serve`, `up`, `keys`, `tenants`."""

from .app import main

__all__ = ["main"]

"""The command line: `headrace run`, `jobs`, `queues`, `show`, `results`, `verify`, `worker`, `serve`, `up`, …"""

from ..imports import importing

with importing():
    from .app import main

__all__ = ["main"]

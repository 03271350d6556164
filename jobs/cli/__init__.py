"""The command line: `headrace run`, `jobs`, `queues`, `show`, `results`, `verify`, `worker`, `serve`, `up`, …"""

from .app import main

__all__ = ["main"]

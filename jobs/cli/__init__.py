"""The command line: `headrace run`, `jobs`, `queues`, `show`, `results`, `verify`, `worker`, `serve`, `up`, …"""

import sys

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """The `headrace` command. Exit status: 0 done, 1 failed on the way, 2 refused before any work, 130 interrupted."""
    try:
        # The libraries take a moment, in which somebody may think better of it.
        from .app import run_command

        run_command(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)

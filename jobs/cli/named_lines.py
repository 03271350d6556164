"""Lines of workers, each behind the name of the one that wrote it."""

import typer


def print_named(width: int, name: str, line: str) -> None:
    """Onto standard error. `width`: of the longest name."""
    # In one write, unlike `print`, between whose two another thread's line may come; nowhere where stderr is closed.
    typer.echo(f"{name.ljust(width)} | {line}", err=True)

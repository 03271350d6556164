"""The ledger of this process's settings."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..storage.ledger.ledger import Ledger
from .settings import Settings, SettingsError


@contextmanager
def open_ledger(settings: Settings) -> Iterator[Ledger]:
    """The ledger with its schema up to date, closed at the end; makes the data folder.

    Raises `LedgerError`, or `SettingsError` when the folder cannot be made.
    """
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"HEADRACE_DATA_DIR={settings.data_dir} cannot be made a folder: {error.strerror}"
        raise SettingsError(problem) from error
    ledger = Ledger(settings.database_url)
    try:
        ledger.migrate()
        yield ledger
    finally:
        ledger.close()

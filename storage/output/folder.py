"""The folder that a job writes its data set into, whatever keeps it: parts, and beside them a manifest."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import OutputLost, PartDamaged

if TYPE_CHECKING:
    import pyarrow.dataset as ds


class OutputFolder(ABC):
    """As text, the address that the ledger knows it by. Names are those of files directly in it.

    What is written is whole and durable when the call returns. Every method raises StorageError.
    """

    @abstractmethod
    def __str__(self) -> str: ...

    # Any file.

    @abstractmethod
    def make(self) -> None:
        """See to it that files can be written into the folder; to be called before any work."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether it is there, which tells a folder that is empty from a disk that is gone."""

    @abstractmethod
    def is_bare(self) -> bool:
        """Whether it is not there or has nothing in it, where that is easily seen: not in a store."""

    @abstractmethod
    def names(self) -> list[str]:
        """All that is in it, hidden files and folders too, sorted; nothing where there is no folder."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a file that is not there yet: of two who try, one. Raises FileExistsError."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a file, over the one there may be; at any moment it is whole."""

    @abstractmethod
    def held(self, name: str) -> AbstractContextManager[bytes | None]:
        """What is in a file, None without one; on a disk nobody else who holds it changes it before the context ends.

        (A store has no such thing: what is read may be replaced by then.)
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are gone already do no harm."""

    @abstractmethod
    def remove_folder(self) -> None:
        """Remove the folder itself, which has to be empty."""

    # Parts: written, committed in the ledger, published. One that was not committed is discarded.

    @abstractmethod
    def write_part(self, name: str, table: pa.Table) -> None:
        """Leaves nothing behind when it fails."""

    @abstractmethod
    def publish(self, name: str) -> None:
        """Give a committed part its name; harmless when it has it already. Raises PartMissing."""

    @abstractmethod
    def withdraw(self, name: str) -> None:
        """Remove a published part that the ledger no longer knows; does nothing when it is gone."""

    @abstractmethod
    def discard(self, name: str) -> None:
        """Remove a written part that was not committed; does nothing when it is gone."""

    @abstractmethod
    def remove_merged(self, names: Sequence[str]) -> None:
        """Remove parts, published or not, in whose place another is committed; those that are gone do no harm."""

    @abstractmethod
    def maybe_uncommitted(self) -> list[str]:
        """The names of written parts of which the folder does not show that they are committed."""

    @abstractmethod
    def unpublished(self, names: Sequence[str]) -> list[str]:
        """Which of these committed parts are there but not seen in the folder yet."""

    @abstractmethod
    def find_parts(self, names: Sequence[str]) -> list[str]:
        """Which of these committed parts are there."""

    @abstractmethod
    def open_part(self, name: str) -> pq.ParquetFile:
        """A committed part, which may be replaced while it is read. Raises PartMissing, pyarrow's errors."""

    @abstractmethod
    def dataset(self, names: Sequence[str]) -> "ds.Dataset":
        """Parts that `find_parts` has found. Where one went since, this or reading raises FileNotFoundError."""

    def lost(self) -> OutputLost:
        """What is said where the folder is not as a job has left it."""
        return OutputLost(
            f"output folder {self} is gone or empty: bring back what was in it (its disk may not be mounted) and the "
            "job goes on; if it is lost, cancel the job and submit it again"
        )

    def part_names(self) -> list[str]:
        """What has a part's name."""
        return [name for name in self.names() if name.startswith("part-") and name.endswith(".parquet")]

    def read_part(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Some or all columns of a committed part. Raises PartMissing, PartDamaged."""
        try:
            with self.open_part(name) as part:
                return part.read(columns if columns is None else list(columns))
        except (OSError, pa.ArrowException) as error:
            raise PartDamaged(f"part {self}/{name} cannot be read: {error}") from error

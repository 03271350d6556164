"""Rows of a completed job whose files are gone: they are planned into further shards, and the others stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ...storage.errors import PartDamaged
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, PartRecord
from ...storage.output.address import open_folder


@dataclass(frozen=True)
class LostRows:
    """`parts`: whose files are gone. `are_lost`: [num_rows], whether no other part has the row."""

    parts: Sequence[PartRecord]
    are_lost: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, ledger: Ledger, job: JobRecord) -> Self | None:
        """None where all is there. Raises StorageError where what is there cannot be read."""
        folder, parts = open_folder(job.output_dir), ledger.parts(job.id)
        there = set(folder.find_parts([part.file_name for part in parts]))
        gone = [part for part in parts if part.file_name not in there]
        # What an attempt found gone, the ledger has forgotten.
        if not gone and sum(part.num_rows for part in parts) == job.num_rows:
            return None
        are_lost = np.ones(job.num_rows, np.bool_)
        for name in there:
            try:
                are_lost[folder.read_part(name, ["row"])["row"].to_numpy()] = False
            except PartDamaged as error:
                raise PartDamaged(f"{error}: remove it, and run --resume makes its rows again too") from error
        return cls(gone, are_lost)

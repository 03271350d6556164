"""Whether a worker can hold a job's LoRA adapter."""

from dataclasses import dataclass, field

from ...engine.errors import ConfigError, ModelError
from ...storage.errors import StorageError
from ...storage.records import JobRecord
from ..schemas import JobSpec


class AdapterTooLarge(StorageError):
    """This worker's max_lora_rank is below the rank of the job's adapter; that of another may not be."""


@dataclass
class FittingAdapters:
    """What a worker can hold of them, and the jobs that it therefore leaves to others."""

    max_lora_rank: int
    left_alone: set[str] = field(default_factory=set)

    def expect(self, job: JobRecord) -> None:
        """Raises `AdapterTooLarge`, after which the job is left alone."""
        lora = JobSpec.model_validate(job.spec).lora
        try:
            if lora is not None:
                lora.check(self.max_lora_rank)
        except ModelError:
            # It may be there later: the attempt says so.
            return
        except ConfigError as error:
            self.left_alone.add(job.id)
            raise AdapterTooLarge(f"a worker cannot hold its adapter: {error}") from error

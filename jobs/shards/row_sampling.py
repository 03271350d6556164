"""How one row is sampled where its job leaves that to each row, as a line of a batch file says it for itself."""

from pydantic import BaseModel, ConfigDict

from ...engine.sampling_params import SamplingParams
from ..spec.sampling import SamplingSpec


class RowSampling(BaseModel):
    """A row's sampling and choices, in the place of its job's. The seed is used as it is: it is the row's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampling: SamplingSpec
    choices: tuple[str, ...] | None = None

    def params(self) -> SamplingParams:
        """Raises `InvalidRequestError` naming the field out of range."""
        return self.sampling.params(self.choices)

    def to_json(self) -> str:
        """For the spool: what differs from the defaults."""
        return self.model_dump_json(exclude_defaults=True)

"""What a model's authors advise of the sampling, as options of a job."""

from contextlib import suppress

from ...engine.checkpoints.hub import locate_model
from ...engine.errors import ModelError
from ...engine.sampling.defaults import SamplingDefaults, read_sampling_defaults
from ..spec.schemas import JobSpec


def sampling_advice(spec: JobSpec) -> str | None:
    """The options for a job that is greedy although its model's authors draw."""
    defaults: SamplingDefaults = {}
    # A job can do without.
    with suppress(ModelError):
        defaults = read_sampling_defaults(locate_model(spec.model, with_weights=False).folder)
    if not defaults or spec.sampling.temperature > 0:
        return None
    advised = {"temperature": 1.0, **defaults}
    if advised["temperature"] == 0:
        return None
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in advised.items())

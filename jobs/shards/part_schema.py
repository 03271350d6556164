"""The columns of a job's data set."""

from collections.abc import Sequence

import pyarrow as pa

from ...storage.output.parts import output_schema
from ..spec.schemas import JobSpec
from .parsed import parsed_type
from .row_calls import has_calls


def part_schema(spec: JobSpec, input_fields: Sequence[pa.Field]) -> pa.Schema:
    """The columns of a job's parts. `input_fields` are the input's, under the names that the output uses."""
    return output_schema(
        input_fields,
        choices=spec.choices or (),
        with_outputs=spec.sampling.n > 1 or spec.samples_each_row,
        with_logprobs=spec.sampling.logprobs or spec.samples_each_row,
        with_all_answers=spec.samples_each_row,
        with_prompt_logprobs=spec.sampling.prompt_logprobs is not None or spec.endpoint == "/v1/completions",
        with_from_cache=spec.cache,
        with_votes=spec.vote,
        with_reasoning=spec.sampling.reasoning or spec.samples_each_row,
        with_doubt_and_receipt=spec.schema_version > 1,
        parsed=parsed_type(spec),
        with_tool_calls=has_calls(spec, [field.name for field in input_fields]),
    )

"""What users send: a job's description, checked once."""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ...engine.checkpoints.hub import model_name
from ...engine.errors import InvalidRequestError
from ...engine.structured.structured_outputs import as_choices
from ...storage.errors import Argument
from ...storage.rows.columns import SCHEMA_VERSION
from ..errors import SpecError
from .checks import number, storable
from .json_values import in_order
from .lora import LoraModule
from .messages import template_kwargs_problem
from .precision import Precision
from .problems import problem, with_arguments
from .sampling import SamplingSpec
from .tool_choice import ToolChoice, check_form, choice_problem, forced_form, is_forced
from .tools import functions_of, tools_problem

# Whoever adds an option adds it here, or to those of `sampling.py`: so do folders that are there stay resumable, and
# workers that have not been upgraded yet go on with jobs that do without it.
_ADDED = (
    *("kv_cache_dtype", "vote", "chat_template_kwargs", "lora", "image", "sampling_defaults", "told_time", "tools"),
    *("tool_choice", "parallel_tool_calls"),
)
KvCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]


class JobSpec(BaseModel):
    """A job: which model answers which prompts, and how.

    `prompt` is a template over the input's columns (`{text}`); without one each row brings `messages`, or a
    `prompt` column of plain text. `choices` restricts every answer to one of them. With an `endpoint` of OpenAI's API
    each row brings the `body` of a request to it instead, and that says how the row is sampled; `sampling.seed` is
    then what rows without a seed derive theirs from, and `sampling_defaults` what else they do not say. With `cache`
    answers that earlier such jobs have given to the same prompts are taken, and new ones kept for later jobs. With
    `vote` the answer is what most of `sampling.n` say. `chat_template_kwargs`: what the model's chat template is told;
    a row's own column of that name goes before it. `lora`: the adapter that the model answers with. `image`: the column
    of a row's image, or images. `told_time`: what a chat template that asks for the time is told in all rows, whenever
    they are asked. `tools`: the functions that the template shows the model; a row's own column goes before them.
    `tool_choice`: whether an answer has to call one, as in OpenAI's chat API, and `parallel_tool_calls`: whether it may
    call several.
    `schema_version`: which columns the data set has, as docs/data-set.md tells; jobs of before it was noted have 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    dtype: str = "auto"
    quantization: Literal["int8"] | None = None
    kv_cache_dtype: KvCacheDType = "auto"
    system: str | None = None
    prompt: str | None = None
    choices: tuple[str, ...] | None = None
    sampling: SamplingSpec = SamplingSpec()
    limit: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] | None = None
    cache: bool = False
    vote: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    lora: LoraModule | None = None
    image: str | None = None
    sampling_defaults: dict[str, int | float] = {}
    told_time: datetime | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = 1

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype, self.quantization, self.kv_cache_dtype)

    @property
    def worker_options(self) -> list[str]:
        """Those of `headrace worker` for one that answers the job."""
        lora = [*self.lora.worker_options, *self.lora.rank_options] if self.lora is not None else []
        return ["--model", self.model, *self.precision.worker_options, *lora]

    @property
    def samples_each_row(self) -> bool:
        """Whether each row says for itself how it is sampled."""
        return self.endpoint is not None

    @property
    def num_answers(self) -> int:
        """How often the engine answers a row at most: of choices, a vote's samples may be drawn from one answer."""
        return 1 if self.draws_votes else self.sampling.n

    @property
    def draws_votes(self) -> bool:
        """Whether all votes come from one answer's probabilities, which do not depend on what was thought before."""
        return self.vote and self.choices is not None and not self.sampling.reasoning

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        return model_name(model)

    @field_validator("limit", mode="before")
    @classmethod
    def _is_number(cls, value: Any) -> Any:
        return number(value)

    @field_validator("choices", mode="before")
    @classmethod
    def _are_several(cls, value: Any) -> Any:
        # Each letter of a text would be a choice.
        if isinstance(value, str):
            raise ValueError("must be a list of texts")
        is_list = isinstance(value, Iterable) and not isinstance(value, Mapping)
        return as_choices(tuple(in_order(value))) if is_list else value

    @field_validator("vote")
    @classmethod
    def _needs_several(cls, value: bool, info: ValidationInfo) -> bool:
        sampling = info.data.get("sampling")
        if value and sampling is not None and sampling.n == 1:
            raise ValueError("needs several answers to each row: give n, and a temperature above 0")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _can_be_told(cls, value: Any) -> Any:
        if value is not None and (problem := template_kwargs_problem(value)) is not None:
            raise PydanticCustomError("template_kwargs", "{problem}", {"problem": problem})
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _can_be_called(cls, value: Any) -> Any:
        if value is not None and (problem := tools_problem(value)) is not None:
            raise PydanticCustomError("tools", "{problem}", {"problem": problem})
        return value

    @field_validator("tool_choice")
    @classmethod
    def _auto_is_none(cls, value: ToolChoice | None) -> ToolChoice | None:
        return None if value == "auto" else value

    @field_validator("model", "system", "prompt", "choices")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        return storable(value)

    @classmethod
    def parse(cls, **values: Any) -> "JobSpec":
        """Check a new job's description. Raises `SpecError` naming the first field that is off."""
        try:
            spec = cls(**{"schema_version": SCHEMA_VERSION, **values})
            # Where nobody has said how long an answer may be, the thinking does not use it up.
            spec = spec.model_copy(update={"sampling": spec.sampling.with_room_to_think()})
            spec.sampling.params(spec.choices)
            spec._check_tool_choice()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            told = with_arguments(f": {problem(first)}")
            raise SpecError(Argument(field.removeprefix("sampling.")), *told, field=field) from error
        except InvalidRequestError as error:
            raise _refusal(error) from error
        return spec

    def _check_tool_choice(self) -> None:
        """Raises `SpecError` where no answer can be as it wants it."""
        if not is_forced(self.tool_choice):
            return
        problem = None
        if self.choices is not None or self.sampling.structure is not None:
            problem = "says what the answer is: leave out what else gives it a form"
        elif self.tools is not None or self.prompt is not None:
            # Otherwise rows may bring functions of their own.
            problem = choice_problem(functions_of(self.tools or ()), self.tool_choice)
        if problem is not None:
            raise SpecError(Argument("tool_choice"), f" {problem}", field="tool_choice")
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self.sampling, name):
                told = " cannot be held to beside ", Argument("tool_choice"), ": leave out one of the two"
                raise SpecError(Argument(name), *told, field=f"sampling.{name}")
        if self.tools is None:
            return
        functions = functions_of(self.tools)
        try:
            check_form(forced_form(functions, self.tool_choice), functions, self.tool_choice)
        except ValueError as error:
            raise SpecError(Argument("tools"), f": {error}", field="tools") from error

    def fingerprint(self, input_fingerprint: str) -> str:
        """The same for the same work: the input's content and every option that can change an answer."""
        # Folders of before there was a choice of these, and of another day, are resumed too.
        left_out = {"cache": True, "schema_version": True, "told_time": True, **self._unasked}
        text = f"{input_fingerprint}\n{self.model_dump_json(exclude=left_out)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def stored(self) -> dict[str, Any]:
        """As the ledger keeps it, for `read_stored`; an earlier version reads one that uses nothing new."""
        return self.model_dump(mode="json", exclude=self._unasked)

    @property
    def _unasked(self) -> dict[str, Any]:
        """What there has not been from the beginning and nobody asks for, as pydantic leaves it out."""
        fields = type(self).model_fields
        unasked: dict[str, Any] = {name: True for name in _ADDED if getattr(self, name) == fields[name].default}
        later = self.sampling.unasked
        return {**unasked, "sampling": later} if later else unasked


def _refusal(error: InvalidRequestError) -> SpecError:
    """What `SamplingParams` refuses: its messages begin with the field's name."""
    assert error.field is not None
    field = error.field if error.field in JobSpec.model_fields else f"sampling.{error.field}"
    return SpecError(Argument(error.field), *with_arguments(str(error).removeprefix(error.field)), field=field)

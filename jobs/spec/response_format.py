"""What an answer has to look like, as users say it: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ...engine.errors import InvalidRequestError
from ...engine.structured.grammar import check_grammar
from ...engine.structured.structured_outputs import StructuredOutputsParams, as_choices, as_schema
from .json_values import in_order

_FROZEN = ConfigDict(
    frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
)


_EXAMPLE = '{"type": "json_schema", "json_schema": {"schema": {…}}}'


class JsonSchemaFormat(BaseModel):
    """A JSON schema under the name `schema`. Every answer follows it, whether `strict` or not."""

    model_config = _FROZEN

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "answer"
    description: str | None = None
    # pydantic's own models have a `schema`.
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's: any text, any JSON object, or JSON that follows a schema. A pydantic model stands for its schema."""

    model_config = _FROZEN

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_model(cls, given: Any) -> Any:
        """As the official client's `parse` takes it."""
        schema = as_schema(given)
        if schema is not given:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        if not isinstance(given, Mapping | cls):
            allowed = f"an object such as {_EXAMPLE}, or in Python the class of a pydantic model"
            raise ValueError(f"must be {allowed}")
        return given

    @cached_property
    def params(self) -> StructuredOutputsParams | None:
        """The same for the engine. Raises `ValueError` where a schema is missing or nobody asked for it."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                f"type {self.type} {'lacks' if self.json_schema is None else 'has no use for'} json_schema"
            )
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        return None if self.json_schema is None else StructuredOutputsParams(json=self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """vLLM's: exactly one of a JSON schema, any JSON object, a regular expression, some texts, a grammar."""

    model_config = _FROZEN

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json"), BeforeValidator(as_schema)] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(in_order),
        BeforeValidator(as_choices, json_schema_input_type=list[str | int] | None),
    ] = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    @cached_property
    def params(self) -> StructuredOutputsParams:
        """The same for the engine. Raises `InvalidRequestError`."""
        return StructuredOutputsParams(
            json=self.json_,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            disable_any_whitespace=self.disable_any_whitespace,
        )


def checked(given: "ResponseFormat | StructuredOutputs | None") -> None:
    """Compile what was given, without a model. Raises `ValueError` saying what is wrong with it."""
    try:
        if given is not None and given.params is not None:
            check_grammar(given.params)
    except InvalidRequestError as error:
        raise ValueError(str(error).removeprefix("structured_outputs: ")) from error

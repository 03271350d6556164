"""What a request for a job says."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator
from pydantic_core import PydanticCustomError

from ...engine.structured.structured_outputs import MAX_GRAMMAR_BYTES
from ...storage.ledger.records import NewWebhook
from ...storage.output.sinks import DEFAULT_TABLE, SinkSpec
from ..errors import SpecError
from ..outside.addresses import AddressRefused, check_prefix
from ..outside.webhooks import parse_webhook
from ..spec.durations import MAX_WITHIN_SECONDS
from ..spec.precision import Precision
from ..spec.priority import MAX_PRIORITY
from ..spec.sampling import SamplingSpec
from ..spec.schemas import KvCacheDType
from ..spec.tool_choice import ToolChoice
from .models import ServedModel
from .schemas import Choices, Name, Text

_EXAMPLE: dict[str, JsonValue] = {
    "model": "model",
    "rows": [{"custom_id": "ticket-1", "text": "I was charged twice this month."}],
    "prompt": "{text}",
    "choices": ["billing", "shipping"],
}
_FROM_URL: dict[str, JsonValue] = {
    "model": "model",
    "input_url": "https://example.com/tickets.jsonl.gz",
    "prompt": "{text}",
    "within_seconds": 86400,
    "webhook": {"url": "https://example.com/hooks", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"},
}


# What a sink's URL may say behind its question mark. Others (`host`, `service`, `passfile`, `sslkey`, …) would lead to
# another place than the URL seems to, or name files of the server's.
_SINK_OPTIONS = ("application_name", "channel_binding", "client_encoding", "options", "sslmode")
_PRECISION = (
    "Of the workers that are to do it. Where a job names none of these it goes to those that the server was set up for."
)
Priority = Annotated[
    int,
    Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Jobs with a higher one are worked on first."),
]
_PlainFormat = Literal["jsonl", "ndjson", "json", "csv", "tsv", "parquet"]
_CompressedFormat = Literal["jsonl.gz", "json.gz", "csv.gz", "tsv.gz", "jsonl.zst", "json.zst", "csv.zst", "tsv.zst"]
InputFormat = Literal[_PlainFormat, _CompressedFormat]


# The first bad row is enough: a message for each of a million helps nobody.
Rows = Annotated[list[dict[str, JsonValue]], Field(min_length=1, fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SinkRequest(_Body):
    """A database whose table also gets the rows; the server allows only those it was configured for."""

    url: Annotated[Name, Field(max_length=2000, examples=["postgresql://user@db.example.com/labels"])]
    table: Annotated[Name, Field(min_length=1, max_length=120)] = DEFAULT_TABLE

    def spec(self, allowed: tuple[str, ...]) -> SinkSpec:
        """Raises `SpecError` where the server does not allow it, `SinkError`."""
        # A user and a password belong into a database's URL, but hide where it leads.
        scheme, separator, rest = self.url.partition("://")
        user, _, place = rest.rpartition("@")
        try:
            check_prefix(f"{scheme}{separator}{place}", allowed)
            if "/" in user:
                raise AddressRefused("has a user that no URL has")
        except AddressRefused as error:
            raise SpecError(f"sink.url {error}: see HEADRACE_SINK_URLS", field="sink.url") from error
        sink = SinkSpec.parse(self.url, self.table)
        if refused := sorted(sink.options.difference(_SINK_OPTIONS)):
            problem = f"must not say {refused[0]!r}, only {', '.join(_SINK_OPTIONS)}: leave it out"
            raise SpecError(f"sink.url {problem}", field="sink.url")
        return sink


class WebhookRequest(_Body):
    """Where the end of the job, or of the batch, is to be told, as a POST request with an event.

    `{"id": "evt_…", "object": "event", "type": "job.completed", "created_at": 1767225600, "data": {"id": "job_…"}}`;
    other types are `job.failed` (no row has an answer), `job.cancelled` and `job.expired`, and a batch's as OpenAI
    names them: `batch.completed`, `batch.failed`, `batch.cancelled` and `batch.expired`. With a `secret` it is
    signed as Standard Webhooks has it. It is sent again, less and less often, until the answer's status is 2xx, for
    at most a day. The same event may come more than once.
    """

    url: Annotated[Name, Field(max_length=2000)]
    secret: Annotated[Name, Field(min_length=1, max_length=200)] | None = None

    def parsed(self) -> NewWebhook:
        """Raises `SpecError`."""
        return parse_webhook(self.url, self.secret)


class JobOptions(_Body):
    """How rows are to be answered.

    `prompt` is a template over the rows' fields (`{text}`); without one each row brings `messages` or a `prompt`.
    `choices` restricts every answer to one of them. A row's `custom_id` comes back with its answer. Rows without
    an answer `within_seconds` expire. `limit`: only the first rows of the input. With `cache` answers that earlier
    such jobs of yours have given to the same prompts are taken, and new ones kept. With `vote` a row's answer is what
    most of its `sampling.n` samples say; those that can no longer change it are not generated.
    """

    model: Annotated[Text, Field(max_length=4096)]
    prompt: Text | None = None
    system: Text | None = None
    choices: Choices | None = None
    sampling: SamplingSpec = SamplingSpec()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(default=None, description=_PRECISION)
    quantization: Literal["int8"] | None = Field(default=None, description=_PRECISION)
    kv_cache_dtype: KvCacheDType | None = Field(default=None, description=_PRECISION)
    limit: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    cache: bool = False
    vote: bool = False
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        default=None,
        description="What the model's chat template is told. A row's own `chat_template_kwargs` go before it.",
        examples=[{"enable_thinking": False}],
    )
    tools: list[dict[str, JsonValue]] | None = Field(
        default=None,
        description="Functions as in chats, which the model's chat template shows it: its calls are in the column "
        "`tool_calls`. A row's own `tools` go before them.",
        examples=[[{"type": "function", "function": {"name": "close", "parameters": {"type": "object"}}}]],
    )
    tool_choice: ToolChoice | None = Field(default=None, description="As in chats: whether an answer has to be a call.")
    parallel_tool_calls: bool = Field(default=True, description="As in chats: whether an answer may have several.")
    within_seconds: Annotated[float, Field(gt=0, le=MAX_WITHIN_SECONDS)] | None = None
    priority: Priority = 0
    input_format: InputFormat | None = Field(
        default=None, description="Of a file or a URL whose name does not end in its format."
    )
    sink: SinkRequest | None = None
    webhook: WebhookRequest | None = None

    @field_validator("choices")
    @classmethod
    def _are_not_too_many(cls, choices: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """As of live requests: each row is asked wherever two of them part, by a worker that others have to share."""
        num_bytes = sum(len(choice.encode(errors="surrogatepass")) for choice in choices or ())
        if num_bytes > MAX_GRAMMAR_BYTES:
            problem = f"are {num_bytes} bytes together, but at most {MAX_GRAMMAR_BYTES} are taken: give fewer"
            raise PydanticCustomError("choices", "{problem}", {"problem": problem})
        return choices

    def of_spec(self, served: ServedModel) -> dict[str, Any]:
        """The fields of a `JobSpec`."""
        names = {"prompt", "system", "choices", "limit", "cache", "vote", "chat_template_kwargs"}
        names |= {"tools", "tool_choice", "parallel_tool_calls"}
        # What is not said has defaults that depend on the rest.
        sampling = self.sampling.model_dump(exclude_unset=True)
        given = {name: getattr(self, name) for name in Precision._fields}
        # Whoever names one of these means workers with exactly that.
        precision = {k: v for k, v in given.items() if v is not None} or served.precision._asdict()
        model = {"model": served.exact_name, "lora": served.lora}
        return {**self.model_dump(include=names), "sampling": sampling, **precision, **model}


class JobRequest(JobOptions):
    """A job over `rows` that come with the request, a file that was uploaded to `/v1/files`, or a URL: one of them.

    The server allows only the URLs that it was configured for; they may also name folders where their scheme has any.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE, _FROM_URL]})

    rows: Rows | None = None
    input_file_id: Annotated[Name, Field(max_length=64)] | None = None
    input_url: Annotated[Name, Field(max_length=4096)] | None = None

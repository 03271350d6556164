"""What the environment says, read once and checked."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..engine.paths import absolute_path

_PREFIX = "HEADRACE_"
# Switches of the test suite, which runs our processes with its own environment.
_IGNORED_PREFIX = "HEADRACE_TEST_"
# The kernels read it themselves: they run without this package too.
_READ_ELSEWHERE = frozenset(("HEADRACE_NATIVE_KERNELS",))
# What is longer no clock of ours counts, and what is more no database.
_MOST_SECONDS = 366 * 86400
_MOST = 2**63 - 1
# As many shards Celery asks a broker for at a time.
_MOST_SHARDS = 2**16 - 1
# Those that browsers leave out of an origin.
_USUAL_PORTS = {"http": 80, "https": 443}


class SettingsError(ValueError):
    """A HEADRACE_* variable is unknown or has a value that cannot be used; the message is one line."""


def _has_scheme(*schemes: str) -> AfterValidator:
    def check(url: str) -> str:
        scheme, separator, _ = url.partition("://")
        if not separator or scheme.partition("+")[0] not in schemes:
            raise ValueError(f"should start with {' or '.join(f'{name}://' for name in schemes)}")
        return url

    return AfterValidator(check)


def _with_a_port(url: str) -> str:
    """Or with none."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        # What is wrong may be a part of the password.
        problem = (
            "cannot be read: use redis://user:password@host:6379/0, in the password %40 for @, %2F for / and so on"
        )
        raise ValueError(problem) from error
    return url


def _with_one_at(url: str) -> str:
    """Or with none: what follows the first is taken for the host, and shown, be it the rest of a password."""
    scheme, _, address = url.partition("://")
    if scheme != "sqlite" and address.partition("?")[0].count("@") > 1:
        raise ValueError("cannot be read: in its password write %40 for @ and %25 for %")
    return url


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _parts(value: Any) -> Any:
    """A list, which a variable of the environment writes with commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _have_schemes(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    for prefix in prefixes:
        if "://" not in prefix or prefix.startswith("file:"):
            raise ValueError("should be beginnings of URLs such as https:// or s3://bucket/")
    return prefixes


def _have_no_user(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    for prefix in prefixes:
        if "@" in prefix:
            raise ValueError("should have no user or password: those of a client's sink are not looked at")
    return prefixes


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins with commas between them. Raises `ValueError`, with what to write instead."""
    return _are_origins(tuple(_parts(text)))


def _are_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Each as browsers send it in `Origin`."""
    for origin in origins:
        written = _origin(origin)
        if written is None:
            raise ValueError(
                f"{origin!r} is no origin: write scheme and host, with the port where it is not the usual one, such as "
                "https://app.example.com or http://localhost:3000, with commas between several, or * for all"
            )
        if written != origin:
            raise ValueError(f"{origin!r} is no origin as browsers send it: write {written}")
    return origins


def _origin(url: str) -> str | None:
    """That of a page with this URL; None where it has none that can be known."""
    if url == "*":
        return url
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not (parts.scheme and host and host.isascii()) or "*" in host:
        return None
    shown = f"[{host}]" if ":" in host else host
    is_usual = port is None or port == _USUAL_PORTS.get(parts.scheme)
    return f"{parts.scheme}://{shown}{'' if is_usual else f':{port}'}"


AllowedOrigins = Annotated[tuple[str, ...], BeforeValidator(_parts), AfterValidator(_are_origins)]
UrlPrefixes = Annotated[tuple[str, ...], BeforeValidator(_parts), AfterValidator(_have_schemes)]
RedisUrl = Annotated[str, _has_scheme("redis", "rediss", "unix"), AfterValidator(_with_a_port)]
DatabaseUrl = Annotated[str, _has_scheme("sqlite", "postgresql"), AfterValidator(_with_one_at)]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)]


class Settings(BaseModel):
    """The process's configuration; each field is the variable HEADRACE_<FIELD> of the environment.

    `data_dir` is absolute and `redis_url` is None when the embedded Valkey is to be used. What HTTP clients may name:
    inputs whose URLs begin with one of `input_urls`, sinks with one of `sink_urls` (none unless set); hosts with
    private addresses only with `allow_private_addresses`. `max_body_bytes` bounds a request's body (a live one's is
    never more than 4 MiB), `max_file_bytes` an uploaded file,
    `max_open_requests` the live requests of one model that have not ended, `max_queued_jobs` the jobs that have not.
    With `metrics_require_key` the API's metrics need an API key too, once there are any. Pages of `allowed_origins` may
    use the API from browsers; "*": any page.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path
    redis_url: RedisUrl | None = None
    database_url: DatabaseUrl
    # Workers look for dead ones once a second: a shorter lease gains nothing, and a ledger's hiccup loses it.
    lease_seconds: float = Field(default=6.0, ge=1, le=_MOST_SECONDS)
    # None: by the size of the job.
    shard_rows: int | None = Field(default=None, ge=1, le=_MOST)
    flush_seconds: float = Field(default=2.0, gt=0, le=_MOST_SECONDS)
    worker_concurrency: int = Field(default=4, ge=1, le=_MOST_SHARDS)
    stream_ttl_seconds: int = Field(default=3600, ge=1, le=_MOST_SECONDS)
    result_cache_ttl_seconds: int = Field(default=86_400, ge=1, le=_MOST_SECONDS)
    log_level: LogLevel = "INFO"
    input_urls: UrlPrefixes = ("https://",)
    sink_urls: Annotated[UrlPrefixes, AfterValidator(_have_no_user)] = ()
    allow_private_addresses: bool = False
    max_body_bytes: int = Field(default=16 * 2**20, ge=1, le=_MOST)
    max_file_bytes: int = Field(default=4 * 2**30, ge=1, le=_MOST)
    max_open_requests: int = Field(default=4096, ge=1, le=_MOST)
    max_queued_jobs: int = Field(default=10_000, ge=1, le=_MOST)
    metrics_require_key: bool = False
    allowed_origins: AllowedOrigins = ()

    @property
    def inputs_folder(self) -> Path:
        """Where rows lie that come some other way than in a file, until they are submitted."""
        return self.data_dir / "inputs"

    @property
    def outputs_folder(self) -> Path:
        """Where the data sets of jobs lie that come over HTTP."""
        return self.data_dir / "outputs"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read every HEADRACE_* variable; an empty one counts as not set. Raises SettingsError."""
        values = {name: value for name, value in environ.items() if _is_ours(name) and value}
        for name in values:
            _refuse_unknown(name, cls.model_fields)
        fields: dict[str, Any] = {name.removeprefix(_PREFIX).lower(): text for name, text in values.items()}
        try:
            data_dir = absolute_path(fields.get("data_dir") or _default_data_dir(environ))
        except ValueError as error:
            raise SettingsError(f"{_PREFIX}DATA_DIR {error}") from error
        fields["data_dir"] = data_dir
        fields.setdefault("database_url", f"sqlite:///{data_dir / 'headrace.db'}")
        try:
            return cls(**fields)
        except ValidationError as error:
            raise SettingsError(_one_line(error)) from error

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """That of a process which is to have these settings, and `environ` beside them."""
        others = {name: value for name, value in environ.items() if not _is_ours(name)}
        ours = {_PREFIX + name.upper(): _text(value) for name, value in self if value is not None}
        return others | ours


def _text(value: Any) -> str:
    """As a variable of the environment has it."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _is_ours(name: str) -> bool:
    return name.startswith(_PREFIX) and not name.startswith(_IGNORED_PREFIX) and name not in _READ_ELSEWHERE


def _refuse_unknown(name: str, known_fields: Mapping[str, object]) -> None:
    known = [_PREFIX + field.upper() for field in known_fields]
    if name in known:
        return
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise SettingsError(f"unknown environment variable {name}: did you mean {nearest[0]}?")


def _default_data_dir(environ: Mapping[str, str]) -> Path:
    data_home = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data_home) / "headrace"


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = _PREFIX + str(first["loc"][0]).upper()
    # A URL may hold a password, which must not reach a log.
    shown = "" if name.endswith(("_URL", "_URLS")) else f"={first['input']}"
    return f"{name}{shown}: {first['msg'].removeprefix('Value error, ')}"

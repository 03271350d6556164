"""`headrace serve`: the HTTP API, until told to stop."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import typer

from ...storage.errors import Argument
from ..errors import SpecError
from ..open_ledger import open_ledger
from ..settings import Settings, parse_origins
from ..spec.lora import parse_loras
from ..spec.precision import Precision
from .imports import importing
from .options import DType, GenerationConfig, KvCacheDType, LoraModules, Quantization, ServedModelName
from .signatures import takes

if TYPE_CHECKING:
    from ..api.models import ServedModels


@dataclass(frozen=True)
class Serving:
    """Which models are served in which precision, and where."""

    models: Sequence[str]
    precision: Precision
    host: str
    port: int
    grpc_port: int | None
    allow_anonymous: bool
    lora_modules: Sequence[str] = ()
    served_model_name: str | None = None
    generation_config: GenerationConfig = "auto"
    allowed_origins: tuple[str, ...] | None = None

    def serve(self, settings: Settings, on_listening: Callable[[str], None]) -> None:
        """Until SIGTERM or SIGINT. Raises what `api.server.serve` raises, and `AnonymousError`."""
        # Here, not above: other commands should not wait for the web framework.
        with importing():
            from ..api.server import refuse_anonymous
            from ..api.server import serve as serve_api

        if self.allowed_origins is not None:
            settings = settings.model_copy(update={"allowed_origins": self.allowed_origins})
        if not self.allow_anonymous:
            with open_ledger(settings) as ledger:
                refuse_anonymous(ledger, self.host)
        serve_api(settings, self.served, self.host, self.port, on_listening, self.grpc_port, self.allow_anonymous)

    @cached_property
    def served(self) -> "ServedModels":
        """The models, checked. Raises what `ServedModels.of` raises."""
        from ..api.models import ServedModels

        loras = parse_loras(self.lora_modules)
        return ServedModels.of(self.models, self.precision, loras, self.served_model_name, self.generation_config)


def serving(
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            help="Model that requests may name: a folder, by its last part, or a Hugging Face id. May be repeated.",
        ),
    ],
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDType = "auto",
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 picks a free one.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option("--grpc-port", min=0, max=65535, help="Also answer gRPC; 0 picks a free one.")
    ] = None,
    allow_anonymous: Annotated[
        bool,
        typer.Option(
            "--allow-anonymous", help="Without an API key, listen beyond this machine and answer to any host."
        ),
    ] = False,
    allowed_origins: Annotated[
        str | None,
        typer.Option(
            "--allowed-origins",
            metavar="ORIGINS",
            help="Sites whose pages may use it from a browser (CORS): https://app.example.com, with commas between "
            "several, or * for all; default: HEADRACE_ALLOWED_ORIGINS, or none.",
        ),
    ] = None,
    lora_modules: LoraModules = None,
    served_model_name: ServedModelName = None,
    generation_config: GenerationConfig = "auto",
) -> Serving:
    """The options of a server. Raises `SpecError`."""
    precision, loras = Precision(dtype, quantization, kv_cache_dtype), lora_modules or ()
    names, origins = (served_model_name, generation_config), _parse_origins(allowed_origins)
    return Serving(model, precision, host, port, grpc_port, allow_anonymous, loras, *names, origins)


def _parse_origins(text: str | None) -> tuple[str, ...] | None:
    try:
        return None if text is None else parse_origins(text)
    except ValueError as error:
        raise SpecError(Argument("allowed_origins"), f": {error}") from error


@takes(serving)
def serve(serving: Serving) -> None:
    """Take requests and jobs over HTTP. Workers do them: run `headrace worker` with the same --model, --dtype,
    --quantization and --kv-cache-dtype.

    SIGTERM or Ctrl-C ends what is under way and exits. Once `headrace keys create` has made a key, every request
    needs one. Before that everybody who can connect may use it, so it listens on this machine only.
    """
    settings = Settings.from_environment()
    logging.getLogger("headrace").setLevel(settings.log_level)
    serving.serve(settings, say_where)


def say_where(url: str) -> None:
    typer.echo(f"headrace: listening on {url}")

"""LoRA adapters by the names that operators give them, as jobs and requests carry them to a worker."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ...engine.checkpoints.hub import public_name
from ...engine.config import EngineConfig
from ...engine.errors import ModelError, shown
from ...engine.lora.adapter_folder import AdapterConfig
from ...engine.lora_request import LoRARequest
from ...engine.paths import absolute_path
from ...storage.errors import Argument
from ...storage.ledger.records import JobRecord
from ..errors import SpecError

LORA_MODULES = Argument("lora_modules")


class LoraModule(BaseModel):
    """An adapter's name, and the folder that PEFT has saved it in: where workers find it too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[^={][^=]*$", max_length=256)]
    path: Annotated[str, Field(min_length=1)]

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        return str(absolute_path(path))

    def check(self, max_lora_rank: int | None = None) -> None:
        """Whether it may be one that a model can be adapted by. Reads no weights.

        Raises `ModelError`, and `ConfigError` where its rank is above that of a worker's `max_lora_rank`.
        """
        config = AdapterConfig.read(Path(self.path))
        if max_lora_rank is not None:
            config.expect_rank(Path(self.path), max_lora_rank)

    def request(self, number: int = 1) -> LoRARequest:
        """For the engine."""
        return LoRARequest(self.name, number, self.path)

    @property
    def worker_options(self) -> list[str]:
        """What `headrace worker` is started with to have it from the beginning."""
        return ["--lora-modules", f"{self.name}={self.path}"]

    @property
    def rank_options(self) -> list[str]:
        """What a worker for it alone is started with beside them: room for its rank, where that is above the default.

        Nothing where it cannot be read here: what is wrong with it the worker says.
        """
        try:
            rank = AdapterConfig.read(Path(self.path)).rank
        except ModelError:
            return []
        return ["--max-lora-rank", str(rank)] if rank > EngineConfig().max_lora_rank else []


class ServedLora(LoraModule):
    """One of `--lora-modules`. `base_model_name`: the model that it adapts, where several are served."""

    base_model_name: str | None = None

    @property
    def module(self) -> LoraModule:
        return LoraModule(name=self.name, path=self.path)


def parse_loras(texts: Iterable[str]) -> list[ServedLora]:
    """What `--lora-modules` names. Raises `SpecError`."""
    parsed = [parse_lora(LORA_MODULES, text) for text in texts]
    names = [each.name for each in parsed]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(LORA_MODULES, f" names {repeated!r} twice: give each adapter a name of its own")
    return parsed


def as_fields(lora: LoRARequest | None) -> dict[str, str] | None:
    """The fields of a `LoraModule`, to be checked with the rest of what it is asked with. Raises `SpecError`."""
    if not isinstance(lora, LoRARequest | None):
        raise SpecError(f"lora_request must be a headrace.LoRARequest, not {shown(lora)}", field="lora_request")
    return None if lora is None else {"name": lora.lora_name, "path": lora.lora_path}


def worker_options(loras: Sequence[LoraModule]) -> list[str]:
    return [word for lora in loras for word in lora.worker_options]


def answers_as(model: str, lora_path: str | None) -> str:
    """What tells a model's answers, with an adapter or without, from those of others, on whichever server."""
    return model if lora_path is None else f"{model}|{lora_path}"


def asked_model(job: JobRecord) -> str:
    """What clients call what a job was asked of: its adapter, or its model."""
    lora = job.spec.get("lora")
    return str(lora["name"]) if lora else public_name(job.model)


def parse_lora(option: Argument, text: str) -> ServedLora:
    """One given as `name=path` or as JSON, as in vLLM. Raises `SpecError` naming the option."""
    name, _, path = text.partition("=")
    try:
        return ServedLora.model_validate_json(text) if text.startswith("{") else ServedLora(name=name, path=path)
    except ValidationError as error:
        problem = f" must be NAME=FOLDER, or JSON with name, path and perhaps base_model_name, not {text!r}"
        raise SpecError(option, problem) from error

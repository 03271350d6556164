"""Which models a request may name: those the operator has listed, never a path of the client's choice."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from ...engine.checkpoints.hub import locate_model, public_name
from ...engine.sampling.defaults import SamplingDefaults
from ...storage.errors import Argument
from ...storage.ledger.records import JobRecord
from ..broker.celery_app import live_queue, shard_queue
from ..errors import SpecError
from ..live.prompt import LivePrompts
from ..spec.lora import LORA_MODULES, LoraModule, ServedLora, answers_as, asked_model
from ..spec.precision import DEFAULT_PRECISION, Precision
from .errors import ApiError

GenerationConfig = Literal["auto", "vllm"]
_MODEL = Argument("model")
SERVED_MODEL_NAME = Argument("served_model_name")


@dataclass(frozen=True)
class ServedModel:
    """A model by the `name` that clients use, and by what `headrace worker` and the queues call it.

    `precision`: what its workers were started with; requests that name none go to these. One with a `lora` is an
    adapter by its own name; all but that is its base model's. `sampling_defaults`: what requests do not say of how they
    are sampled.
    """

    name: str
    exact_name: str
    precision: Precision
    lora: LoraModule | None = None
    sampling_defaults: SamplingDefaults = field(default_factory=dict)

    @classmethod
    def read(cls, noted: Mapping[str, Any]) -> Self:
        """From what `as_noted` gave."""
        return cls(
            noted["name"],
            noted["model"],
            Precision(**noted["precision"]),
            None if noted["lora"] is None else LoraModule.model_validate(noted["lora"]),
            noted["sampling_defaults"],
        )

    def as_noted(self) -> dict[str, Any]:
        """What the ledger keeps of it."""
        return {
            "name": self.name,
            "model": self.exact_name,
            "precision": self.precision._asdict(),
            "lora": None if self.lora is None else self.lora.model_dump(),
            "sampling_defaults": dict(self.sampling_defaults),
        }

    @property
    def live_queue(self) -> str:
        return live_queue(self.exact_name, self.precision)

    @property
    def shard_queue(self) -> str:
        """The queue by which its workers' presence is known."""
        return shard_queue(self.exact_name, self.precision)

    @property
    def answers_as(self) -> str:
        """What tells its answers from those of other models, on whichever server."""
        return answers_as(self.exact_name, None if self.lora is None else self.lora.path)

    @property
    def worker_options(self) -> list[str]:
        """What its workers are started with, beside the model. They take adapters as these are asked for."""
        return self.precision.worker_options

    @property
    def prompts(self) -> LivePrompts:
        return LivePrompts.of(self.exact_name)


class ServedModels:
    """The models by the names that requests may use: of a folder its last part, of a Hugging Face model its id.

    Base models come before their adapters.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        # Unix seconds: since when they are served here.
        self.created = int(time.time())

    @classmethod
    def of(
        cls,
        models: Sequence[str],
        precision: Precision = DEFAULT_PRECISION,
        lora_modules: Sequence[ServedLora] = (),
        served_model_name: str | None = None,
        generation_config: GenerationConfig = "auto",
    ) -> Self:
        """Check the models and name them. `precision`: their workers'; `lora_modules`: adapters of them.

        `served_model_name`: what a model that is the only one is called instead of its own name. `generation_config`:
        whether models are sampled as their authors would have it where requests say nothing ("auto"), or as OpenAI's
        API has it ("vllm"). Raises `ModelError`, `ConfigError`, or `SpecError` when two have the same name.
        """
        precision.check()
        if served_model_name == "":
            raise SpecError(SERVED_MODEL_NAME, " is empty: leave it out, or say what requests call the model")
        if served_model_name is not None and len(models) > 1:
            raise SpecError(SERVED_MODEL_NAME, f" {served_model_name} is for one ", _MODEL, ": pass a single one")
        exact_names: dict[str, str] = {}
        for model in models:
            located = locate_model(model, with_weights=False)
            # Also has its tokenizer ready for the first request.
            LivePrompts.of(located.name)
            name = served_model_name or public_name(located.name)
            if (other := exact_names.setdefault(name, located.name)) != located.name:
                problem = f" {located.name} and {other} share a name: link one under another"
                raise SpecError(_MODEL, problem)
        bases = [
            ServedModel(*names, precision, sampling_defaults=_sampling_defaults(names[1], generation_config))
            for names in exact_names.items()
        ]
        return cls([*bases, *(_adapted(lora, bases) for lora in lora_modules)])

    @property
    def all(self) -> Sequence[ServedModel]:
        return self._models

    @property
    def names(self) -> list[str]:
        """All that requests may say, each once."""
        return list(dict.fromkeys(name for served in self._models for name in (served.name, served.exact_name)))

    @property
    def told_names(self) -> list[str]:
        """Those of `names` that clients are told."""
        return [served.name for served in self._models]

    def as_noted(self) -> dict[str, dict[str, Any]]:
        """What the ledger keeps of them, for those that are to know what this server means by a name."""
        return {name: self.model(name).as_noted() for name in self.names}

    def adapters_of(self, base: ServedModel) -> list[LoraModule]:
        return [each.lora for each in self._models if each.lora is not None and each.exact_name == base.exact_name]

    def model(self, model: str) -> ServedModel:
        """A model by its name or its exact name. Raises `ApiError` (404)."""
        for served in self._models:
            if model in (served.name, served.exact_name):
                return served
        known = ", ".join(self.told_names)
        raise ApiError(404, f"model {model!r} is not served here: use {known}", "model_not_found", "model")

    def named_or_only(self, model: str | None) -> ServedModel:
        """Likewise; None is the one base model. Raises `ApiError` (404), or 400 where there are several."""
        if model is not None:
            return self.model(model)
        bases = [served for served in self._models if served.lora is None]
        if len(bases) > 1:
            known = ", ".join(self.told_names)
            raise ApiError(400, f"say which model: {known}", "missing_required_parameter", "model")
        return bases[0]

    def name_of(self, job: JobRecord) -> str:
        """What clients call the model, or the adapter, that a job was asked of; it need not be served any more."""
        return asked_model(job) if job.spec.get("lora") else self.base_name(job.model)

    def base_name(self, exact_name: str) -> str:
        """What clients call a model by its exact name; it need not be served any more."""
        names = (each.name for each in self._models if each.lora is None and each.exact_name == exact_name)
        return next(names, None) or public_name(exact_name)


def _sampling_defaults(exact_name: str, generation_config: GenerationConfig) -> SamplingDefaults:
    return LivePrompts.of(exact_name).sampling_defaults if generation_config == "auto" else {}


def _adapted(lora: ServedLora, bases: Sequence[ServedModel]) -> ServedModel:
    """An adapter as a model. Raises `SpecError`, `ModelError`."""
    if lora.name in (base.name for base in bases):
        raise SpecError(LORA_MODULES, f" {lora.name} has the name of a ", _MODEL, ": give it another")
    named = [base for base in bases if lora.base_model_name in (None, base.name, base.exact_name)]
    if len(named) != 1:
        known = ", ".join(base.name for base in bases)
        problem = f" {lora.name} must say which model it adapts, as JSON with name, path and base_model_name ({known})"
        raise SpecError(LORA_MODULES, problem)
    lora.check()
    (base,) = named
    return replace(base, name=lora.name, lora=lora.module)

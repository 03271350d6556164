"""The folder that PEFT saves an adapter in: what it must hold, and what tells it from others. Free of torch."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..checkpoints.model_folder import read_json_object
from ..errors import ConfigError, ModelError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Fields that change what is computed, each with the only values it may have here.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    # Others change the base model's weights before they train.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True)
class AdapterConfig:
    """What `adapter_config.json` says. `scale`: what the product of the two matrices is multiplied by."""

    rank: int
    scale: float

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises `ModelError` naming what is missing, or the field that is not supported."""
        if not folder.is_dir():
            raise ModelError(f"LoRA adapter {folder} does not exist: name the folder that PEFT has saved it in")
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ModelError(
                    f"LoRA adapter {folder} has no {name}: save it with PEFT's save_pretrained(safe_serialization=True)"
                )
        file = folder / CONFIG_FILE
        raw = read_json_object(file)
        for name, values in _SUPPORTED.items():
            # Older versions of PEFT write fewer fields; what they leave out has its default.
            if (value := raw.get(name, values[0])) not in values:
                remedy = "merge the adapter into the model, or train it without"
                raise ModelError(f"{file}: {name} must be {values[0]!r} here, not {value!r}: {remedy}")
        rank, alpha = _positive(file, raw, "r"), _positive(file, raw, "lora_alpha")
        if not isinstance(rank, int):
            raise ModelError(f"{file}: r must be a whole number, not {rank!r}: save the adapter again")
        return cls(rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank))

    def expect_rank(self, folder: Path, max_lora_rank: int) -> None:
        """Raises `ConfigError` where the adapter's is higher."""
        if self.rank > max_lora_rank:
            raise ConfigError(
                f"LoRA adapter {folder} has r={self.rank}, above max_lora_rank={max_lora_rank}: raise max_lora_rank to "
                f"{self.rank}"
            )


def adapter_identity(folder: Path) -> str:
    """What tells an adapter from others, wherever it lies. Reads all of it; raises OSError."""
    digest = hashlib.blake2b(digest_size=32)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest())
    return f"blake2b:{digest.hexdigest()}"


def _positive(file: Path, raw: dict[str, Any], name: str) -> float:
    value = raw.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise ModelError(f"{file}: {name} must be a positive number, not {value!r}: save the adapter again")

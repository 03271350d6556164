"""How a model's authors would have it sampled, as its files say. Free of torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.gguf.file import GgufModel, is_gguf
from ..checkpoints.model_folder import read_generation_config
from ..errors import ConfigError, InvalidRequestError, ModelError
from ..sampling_params import SamplingParams

# Numbers, by the names of the fields of `SamplingParams` that they are for.
SamplingDefaults = Mapping[str, Any]

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# llama.cpp's. Its penalty looks back on some tokens only, and is not ours.
_GGUF_FIELDS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
}


def chosen_sampling_defaults(generation_config: str | Path, model: Path) -> SamplingDefaults:
    """What vLLM's option of that name chooses: "auto" what comes with the model, "vllm" nothing, a folder its file.

    Raises `ConfigError` where it is none of them, and as `read_sampling_defaults`.
    """
    if generation_config == "vllm":
        return {}
    if generation_config == "auto":
        return read_sampling_defaults(model)
    folder = Path(generation_config) if isinstance(generation_config, str | Path) else None
    if folder is None or not (folder / "generation_config.json").is_file():
        raise ConfigError(
            "generation_config must be auto, vllm, or a folder that has a generation_config.json, "
            f"not {generation_config!r}"
        )
    return read_sampling_defaults(folder)


def read_sampling_defaults(model: Path) -> SamplingDefaults:
    """What `generation_config.json` of a model's folder, or a GGUF file's metadata, says of the sampling.

    As in vLLM `do_sample` says nothing: these are for those who sample. Raises `ModelError` naming what is out of
    range.
    """
    if is_gguf(model):
        metadata = GgufModel.open(model).metadata
        said = {name: metadata.get(field) for name, field in _GGUF_FIELDS.items()}
        where = f"{model}: general.sampling: "
    else:
        generation = read_generation_config(model)
        said = {name: generation.get(name) for name in _FIELDS}
        where = f"{model / 'generation_config.json'}: "
    defaults: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if defaults.get("top_k") == -1:
        # Another way to say all.
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelError(f"{where}{error} (generation_config vllm goes without)") from error
    return defaults

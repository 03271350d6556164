"""What a model is: its `config.json`, with the families' differences resolved into plain fields. Free of torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ModelError, shown
from .families import READERS
from .model_folder import FileError, Raw, at_fault, config_file, read_config, read_json_object, read_stop_ids
from .model_shape import (
    DecoderNames,
    FalconConfig,
    LatentAttentionConfig,
    MlpNames,
    ModelShape,
    MoeConfig,
)
from .quantization_config import read_quantization
from .scalars import few


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """A decoder's shape, as a model's folder says it."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` (and the stop ids of `generation_config.json`) of a model folder, or a GGUF file's.

        Raises `ModelError` when the folder is no model, the architecture is not one of
        `SUPPORTED_ARCHITECTURES`, the weights are quantised in a way that cannot be read, or a needed field is
        missing.
        """
        folder = Path(path)
        raw = read_config(folder)
        read = READERS[_architecture(folder, raw)]
        raw["eos_token_id"] = read_stop_ids(folder, raw)
        try:
            _check_fields(raw)
            with at_fault(_complete_quantization(folder, raw)):
                quantization = read_quantization(raw)
            shape = _without_idle_windows(read(folder, raw))
            if quantization is not None:
                shape = replace(shape, quantization=replace(quantization, other_names=shape.other_names))
            _check(shape)
        except FileError:
            raise
        except ModelError as error:
            raise ModelError(f"{config_file(folder)}: {error}") from error
        except KeyError as missing:
            raise ModelError(f"{config_file(folder)} has no field {missing}") from missing
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"{config_file(folder)} has a field of the wrong kind: {error}") from error
        return cls(**vars(shape))


def _architecture(folder: Path, raw: Raw) -> str:
    """Which of the readers fits. Refuses what none of them could make sense of."""
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"{config_file(folder)}: architectures is {names!r}, and must be a list of names")
    name = next((str(name) for name in names if str(name) in READERS), None)
    if name is None:
        found = ", ".join(map(str, names)) or raw.get("model_type") or "none named"
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"unsupported architecture {found} in {folder}; supported: {supported}")
    return name


def _complete_quantization(folder: Path, raw: Raw) -> Path:
    """Have `raw` say what NVIDIA's ModelOpt first wrote beside it. Returns the file that says how it is quantised."""
    beside = folder / "hf_quant_config.json"
    if raw.get("quantization_config") or not beside.is_file():
        return config_file(folder)
    raw["quantization_config"] = {"quant_method": "modelopt", **read_json_object(beside)}
    return beside


# Of the decoder, of a tower of images, and of layers that guess tokens ahead.
_NUMBERS_OF_LAYERS = ("num_hidden_layers", "depth", "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


def _check_fields(raw: Raw, within: str = "") -> None:
    """Name a field that holds no others where readers look for some, and a number of layers that cannot be meant."""
    for name in _NUMBERS_OF_LAYERS:
        if raw.get(name):
            few(raw, name, within=within)
    for name in ("text_config", "vision_config", "rope_parameters", "rope_scaling"):
        if (found := raw.get(name)) is not None and not isinstance(found, dict):
            raise ModelError(f"{within}{name} must be a JSON object, not {shown(found)}")
        if found and not within:
            _check_fields(found, f"{name}.")


SUPPORTED_ARCHITECTURES = tuple(READERS)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _without_idle_windows(config: ModelShape) -> ModelShape:
    """Windows as wide as the context, as some configs have them, hide nothing; without them prefixes are shared."""
    context = config.max_position_embeddings
    if config.vision is not None and config.vision.two_way_layers == "windows":
        # Whether a layer has one says whether an image's tokens see all of it there.
        return config
    windows = tuple(window if window and window < context else None for window in config.sliding_windows)
    return replace(config, sliding_windows=windows)


def _check(config: ModelShape) -> None:
    """Refuse numbers that cannot be, or contradict each other."""
    _check_sizes(config)
    for index in range(config.num_hidden_layers if config.layers else 0):
        _check_sizes(config.of_layer(index))
    if config.state_layers is not None:
        config.state_layers.check()
    if not config.kv_groups:
        known = "layer_types, attn_layer_indices or hybrid_override_pattern"
        raise ModelError(f"no layer attends, as {known} says: supported are models of which some do")
    if (latent := config.latent_attention) is not None:
        _check_latent(latent)
    _check_rotation(config)
    if config.moe is not None:
        _check_experts(config.moe)
    if config.quantization is not None and config.quantization.method == "mxfp4" and config.gpt_oss is None:
        raise ModelError("quantization_config (mxfp4) is supported for gpt-oss alone: use the model in another format")
    for rope in config.ropes:
        lengths, expected = (len(rope.short_factor), len(rope.long_factor)), config.rotary_dim // 2
        if rope.rope_type == "longrope" and lengths != (expected, expected):
            raise ModelError(
                f"short_factor and long_factor have {lengths[0]} and {lengths[1]} entries where there are {expected} "
                "frequencies"
            )


def _check_sizes(config: ModelShape) -> None:
    for name in _SIZES:
        if (size := getattr(config, name)) < 1:
            raise ModelError(f"{name} must be at least 1, not {size}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads {config.num_attention_heads} is no multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )


def _check_rotation(config: ModelShape) -> None:
    for index, rope in enumerate(config.ropes):
        layer = config.of_layer(index)
        turned, head_dim = layer.rotary_dim, layer.head_dim
        if rope.rope_type != "none" and (turned % 2 or not 2 <= turned <= head_dim):
            raise ModelError(
                f"{turned} of a head's {head_dim} numbers would be rotated: head_dim and partial_rotary_factor must "
                "make that an even number of them"
            )


def _check_experts(moe: MoeConfig) -> None:
    sizes = {
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_latent_size": moe.latent_size,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ModelError(f"{name} must be at least 1, not {size}")
    if moe.num_experts_per_tok > moe.num_experts:
        raise ModelError(f"num_experts_per_tok is {moe.num_experts_per_tok} of {moe.num_experts} experts")
    if moe.num_groups == 1:
        return
    size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or size < 2:
        raise ModelError(f"n_group {moe.num_groups} must divide the {moe.num_experts} experts, into two or more each")
    if not 1 <= moe.num_chosen_groups <= moe.num_groups:
        raise ModelError(f"topk_group {moe.num_chosen_groups} must be 1 to {moe.num_groups}, which n_group is")
    if moe.num_experts_per_tok > size * moe.num_chosen_groups:
        raise ModelError(
            f"num_experts_per_tok is {moe.num_experts_per_tok} of {size * moe.num_chosen_groups} experts: topk_group "
            f"{moe.num_chosen_groups} chooses so many groups of {size}"
        )


def _check_latent(latent: LatentAttentionConfig) -> None:
    sizes = {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": 1 if latent.query_rank is None else latent.query_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{name} must be at least 1, not {size}")
    if latent.rotary_dim % 2:
        raise ModelError(f"qk_rope_head_dim {latent.rotary_dim} is odd: pairs of its numbers are rotated")


__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "DecoderNames",
    "FalconConfig",
    "LatentAttentionConfig",
    "MlpNames",
    "ModelConfig",
    "MoeConfig",
]

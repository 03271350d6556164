"""How large each rank's share of a model is, and which models can be shared. Free of torch."""

from dataclasses import replace

from ..checkpoints.model_config import ModelConfig
from ..checkpoints.model_shape import LayerSizes
from ..checkpoints.quantization_schemes import Int4Scheme
from ..errors import ConfigError

# The decoder layers whose weights' names `Shard` knows.
_LAYERS = ("llama", "gemma", "gemma4", "olmo", "olmo_hybrid", "parallel", "nemotron_h", "falcon_h1")

# From one place to before another.
Range = tuple[int, int]


def share_of(total: int, rank: int, size: int) -> Range:
    """What rank `rank` of `size` has of so many; where they cannot all have as many, some have one more."""
    return rank * total // size, (rank + 1) * total // size


def local_model(model: ModelConfig, rank: int, size: int) -> ModelConfig:
    """A rank's share as a model of its own. Raises `ConfigError` where there is none."""
    require_splittable(model, size)
    moe = model.moe
    if moe is not None:
        shared = moe.shared_expert_intermediate_size
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size // size,
            shared_expert_intermediate_size=None if shared is None else shared // size,
        )
    first_word, end = share_of(model.vocab_size, rank, size)
    return replace(
        model,
        vocab_size=end - first_word,
        num_attention_heads=model.num_attention_heads // size,
        num_key_value_heads=_num_kv_heads(model, size),
        intermediate_size=model.intermediate_size // size,
        layers=tuple(_local_sizes(sizes, size) for sizes in model.layers),
        state_layers=None if model.state_layers is None else model.state_layers.share(size),
        moe=moe,
    )


def _local_sizes(sizes: LayerSizes, size: int) -> LayerSizes:
    inner = sizes.intermediate_size // size
    return replace(sizes, num_key_value_heads=_num_kv_heads(sizes, size), intermediate_size=inner)


def _num_kv_heads(sizes: ModelConfig | LayerSizes, size: int) -> int:
    """Where there are more ranks than heads, some have the same one."""
    return max(1, sizes.num_key_value_heads // size)


def require_splittable(model: ModelConfig, size: int) -> None:
    """Raises `ConfigError` naming both numbers where `size` ranks cannot share the model evenly."""
    option = f"tensor_parallel_size={size}"
    if model.decoder_layer not in _LAYERS:
        raise ConfigError(f"{option} is not supported for models like {model.path} ({model.decoder_layer})")
    if model.qk_norm == "all":
        raise ConfigError(
            f"{option} is not supported for {model.path}, whose queries and keys have norms over all heads: use "
            "pipeline_parallel_size instead"
        )
    if (heads := model.num_attention_heads) % size:
        raise ConfigError(f"{option} must divide num_attention_heads={heads} of {model.path}")
    for kv_heads in dict.fromkeys(sizes.num_key_value_heads for sizes in model.layers or [model]):
        if kv_heads % size and size % kv_heads:
            raise ConfigError(
                f"{option} must divide num_key_value_heads={kv_heads} of {model.path}, or be a multiple of it"
            )
    for name, inner in _divided_sizes(model):
        if inner % size:
            raise ConfigError(f"{option} must divide {name}={inner} of {model.path}")
    if model.vocab_size < size:
        raise ConfigError(f"{option} must be at most vocab_size={model.vocab_size} of {model.path}")
    if model.quantization is not None and any(_has_order(scheme) for _, scheme in model.quantization.schemes):
        raise ConfigError(f"{option} is not supported with desc_act (act-order), as {model.path} has it")


def _divided_sizes(model: ModelConfig) -> list[tuple[str, int]]:
    moe = model.moe
    has_mlps = any(
        model.has_mlp(index) and (moe is None or moe.has_mlp_beside or not moe.sparse_layers[index])
        for index in range(model.num_hidden_layers)
    )
    sizes = [("intermediate_size", model.intermediate_size)] if has_mlps else []
    if moe is not None:
        sizes.append(("moe_intermediate_size", moe.intermediate_size))
        if moe.shared_expert_intermediate_size is not None:
            sizes.append(("shared_expert_intermediate_size", moe.shared_expert_intermediate_size))
    if model.state_layers is not None:
        sizes.append(model.state_layers.divided_size)
    return sizes


def _has_order(scheme: object) -> bool:
    return isinstance(scheme, Int4Scheme) and scheme.has_order

"""What a GGUF file's metadata says of its model, as a `config.json` would say it. Free of torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ModelError, shown
from . import gated_delta_net, with_states
from .file import GgufModel, TensorInfo
from .metadata import HAS_PARTS_APART, Fields
from .names import ROPE_FACTORS, checkpoint_tensors, num_layers
from .vocabulary import stop_token_ids

Raw = dict[str, Any]

# Modules that are multiplied as one: kept in four bits together, or not at all.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("in_proj_qkv", "in_proj_z"))
# Those that the kernels for four bits take as they are, and those that a CPU's take beside them.
_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
_CPU_BITS = (*_FOUR_BITS, "Q5_0", "Q8_0", "Q6_K")
# Gemma's largest divide attention scores by something else than the others.
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}


def read_gguf_config(path: Path) -> Raw:
    """Raises `ModelError` where the file is no whole GGUF file, or its architecture is not one of those here."""
    model = GgufModel.open(path)
    architecture = model.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{path}: unsupported general.architecture {shown(architecture)}; supported: {supported}")
    fields = Fields(model, architecture)
    try:
        raw = _common(fields) | _ARCHITECTURES[architecture](fields)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except KeyError as missing:
        raise ModelError(f"{path} has no field {missing} in its metadata") from missing
    # What is not said is as the architecture has it.
    return {name: value for name, value in raw.items() if value is not None}


def _common(fields: Fields) -> Raw:
    heads = fields.alike("attention.head_count")
    raw = {
        "vocab_size": fields.tensor("token_embd.weight").shape[0],
        "hidden_size": fields.positive("embedding_length"),
        # Mixtures without a dense layer may not say it.
        "intermediate_size": fields.alike(
            "feed_forward_length", fields.whole_or_none("expert_feed_forward_length"), least=0
        ),
        "num_hidden_layers": num_layers(fields.model.metadata, fields.architecture),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.alike("attention.head_count_kv", heads),
        "head_dim": fields.positive_or_none("attention.key_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.positive("context_length"),
        "tie_word_embeddings": not fields.has("output.weight"),
        "attention_bias": fields.has("blk.0.attn_q.bias"),
        "sliding_window": fields.whole_or_none("attention.sliding_window"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields),
        "eos_token_id": stop_token_ids(fields.model.metadata),
        "dtype": _dtype(fields.model),
    }
    return raw | _quantization(fields.model, _FOUR_BITS)


def _llama(fields: Fields) -> Raw:
    mlp_bias = {"mlp_bias": fields.has("blk.0.ffn_gate.bias")}
    if not fields.whole("expert_count", 0):
        return {"architectures": ["LlamaForCausalLM"], **mlp_bias}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": fields.positive("expert_count"),
        **_experts(fields),
    }


def _granite(fields: Fields) -> Raw:
    return {
        "architectures": ["GraniteForCausalLM"],
        "mlp_bias": fields.has("blk.0.ffn_gate.bias"),
        **_granite_scales(fields),
    }


def _granite_moe(fields: Fields) -> Raw:
    """Granite 3's mixtures, and those that have a shared expert."""
    shared = fields.model.tensors.get("blk.0.ffn_gate_shexp.weight")
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        HAS_PARTS_APART: True,
        "num_local_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "shared_intermediate_size": None if shared is None else shared.shape[0],
        **_granite_scales(fields),
    }


def _granite_hybrid(fields: Fields) -> Raw:
    return with_states.granite_hybrid(fields) | _granite_scales(fields)


def _granite_scales(fields: Fields) -> Raw:
    # llama.cpp has it say whether there are rotary positions.
    rotates, has_states = fields.get("rope.scaling.finetuned"), fields.architecture == "granitehybrid"
    if rotates is not None and bool(rotates) == has_states:
        found, supported = ("with", "without") if has_states else ("without", "with")
        raise ModelError(
            f"{fields.within}rope.scaling.finetuned is {shown(rotates)}: models of this architecture "
            f"{found} rotary positions are not supported, but those {supported}"
        )
    return {
        "embedding_multiplier": fields.number_or_none("embedding_scale"),
        "attention_multiplier": fields.number_or_none("attention.scale"),
        "residual_multiplier": fields.number_or_none("residual_scale"),
        "logits_scaling": fields.number_or_none("logit_scale"),
    }


def _smollm3(fields: Fields) -> Raw:
    # No field says which layers know no positions: it is every fourth.
    return {"architectures": ["SmolLM3ForCausalLM"], "mlp_bias": fields.has("blk.0.ffn_gate.bias")}


def _olmo2(fields: Fields) -> Raw:
    """OLMo 2 and 3, the second of which has windows."""
    if not fields.whole("attention.sliding_window", 0):
        return {"architectures": ["Olmo2ForCausalLM"]}
    return {"architectures": ["Olmo3ForCausalLM"], **_layer_types(fields)}


def _qwen2(fields: Fields) -> Raw:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen2_moe(fields: Fields) -> Raw:
    return {"architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": False, **_shared_experts(fields)}


def _qwen3(fields: Fields) -> Raw:
    return {"architectures": ["Qwen3ForCausalLM"]}


def _qwen3_moe(fields: Fields) -> Raw:
    return {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, **_experts(fields)}


def _qwen3_5(fields: Fields) -> Raw:
    """Qwen3-Next too: what tells it from Qwen3.5's mixtures is how its checkpoints lie on disk."""
    heads = fields.positive("ssm.time_step_rank")
    raw = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "full_attention_interval": fields.whole_or_none("full_attention_interval"),
        "linear_conv_kernel_dim": fields.positive("ssm.conv_kernel"),
        "linear_num_key_heads": fields.positive("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.positive("ssm.state_size"),
        "linear_value_head_dim": fields.positive("ssm.inner_size") // heads,
        "partial_rotary_factor": fields.positive("rope.dimension_count") / fields.positive("attention.key_length"),
    }
    return raw | _shared_experts(fields) if fields.whole("expert_count", 0) else raw


def _shared_experts(fields: Fields) -> Raw:
    size = fields.tensor("blk.0.ffn_gate_shexp.weight").shape[0]
    return {"shared_expert_intermediate_size": size, **_experts(fields)}


def _experts(fields: Fields) -> Raw:
    return {
        "num_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.tensor("blk.0.ffn_down_exps.weight", 3).shape[-1],
    }


def _phi3(fields: Fields) -> Raw:
    head_dim = fields.positive("embedding_length") // fields.alike("attention.head_count")
    share = fields.positive("rope.dimension_count", head_dim) / head_dim
    return {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": share}


def _gemma2(fields: Fields) -> Raw:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": _gemma_scalar(fields),
        "attn_logit_softcapping": fields.number_or_none("attn_logit_softcapping"),
        "final_logit_softcapping": fields.number_or_none("final_logit_softcapping"),
    }


def _gemma3(fields: Fields) -> Raw:
    raw = _gemma2(fields) | {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": fields.number("rope.freq_base", 1e6),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 1e4),
    }
    return raw | _layer_types(fields)


def _layer_types(fields: Fields) -> Raw:
    """Which layers have a window: a list of them, or every how many there is one without."""
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        number = num_layers(fields.model.metadata, fields.architecture)
        if len(pattern) != number or not all(isinstance(each, int) for each in pattern):
            raise ModelError(
                f"{fields.within}attention.sliding_window_pattern must be a number or say of each of {number} layers "
                f"whether it has a window, not {shown(pattern)}"
            )
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
    return {} if pattern is None else {"sliding_window_pattern": fields.positive("attention.sliding_window_pattern")}


def _gemma_scalar(fields: Fields) -> float:
    """What attention scores are divided by the root of, which llama.cpp knows by the number of layers."""
    if fields.whole("block_count") == _LARGEST_GEMMA_LAYERS[fields.architecture]:
        return fields.positive("embedding_length") / fields.alike("attention.head_count")
    return fields.positive("attention.key_length")


_ARCHITECTURES: dict[str, Callable[[Fields], Raw]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    **dict.fromkeys(gated_delta_net.ARCHITECTURES, _qwen3_5),
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": with_states.falcon_h1,
    "lfm2": with_states.lfm2,
    "lfm2moe": with_states.lfm2_moe,
    "nemotron_h": with_states.nemotron_h,
    "nemotron_h_moe": with_states.nemotron_h,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
}


def _rope_scaling(fields: Fields) -> Raw | None:
    """As `rope_scaling` of a `config.json`; where the factors are tensors, as those of `longrope`."""
    factors = {name: _floats(fields.model.tensors[name]) for name in ROPE_FACTORS if fields.has(name)}
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    original = fields.whole_or_none("rope.scaling.original_context_length")
    if factors:
        # Llama 3's are the same for every length of context.
        short = factors.get("rope_factors_short.weight") or factors["rope_freqs.weight"]
        long = factors.get("rope_factors_long.weight", short)
        found = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
        return found | {"original_max_position_embeddings": original}
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{fields.within}rope.scaling.type is {shown(kind)}; supported: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": fields.above_zero("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return scaling


def _floats(info: TensorInfo) -> list[float]:
    if info.type.name != "F32":
        raise ModelError(f"tensor {info.name} has the type {info.type.name}; supported: F32")
    numbers: list[float] = np.fromfile(info.file, "<f4", info.shape[-1], offset=info.offset).tolist()
    return numbers


def _dtype(model: GgufModel) -> str:
    """What the matrices are in; bfloat16 where that is no float type, as their range is any."""
    kinds = {info.type.name for info in model.tensors.values() if len(info.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def read_cpu_quantization(path: Path) -> Raw:
    """The `quantization_config` for what kernels of a CPU take as it is; of `read_gguf_config` it is a GPU's."""
    return _quantization(GgufModel.open(path), _CPU_BITS)


def _quantization(model: GgufModel, kept: Sequence[str]) -> Raw:
    """A `quantization_config` for what stays in the types `kept`; all else is dequantised."""
    # Blocks whose parts belong elsewhere cannot be kept.
    sources = {
        name.removesuffix(".weight"): source
        for name, source in checkpoint_tensors(model).items()
        if name.endswith(".weight") and source.has_whole_groups
    }
    kinds = {module: source.info.type.name for module, source in sources.items()}
    # Some models have no gates.
    known = {module.rpartition(".")[2] for module in kinds}
    modules: dict[str, list[str]] = {}
    # An embedding is looked up, and multiplied by where it is the head as well.
    is_head = kept == _CPU_BITS and "output.weight" not in model.tensors
    for module, source in sources.items():
        is_multiplied = is_head or source.info.name != "token_embd.weight"
        if kinds[module] in kept and is_multiplied and _is_like_its_neighbours(module, kinds, known):
            modules.setdefault(kinds[module], []).append(module)
    return {"quantization_config": {"quant_method": "gguf", "modules": modules}} if modules else {}


def _is_like_its_neighbours(module: str, kinds: dict[str, str], known: set[str]) -> bool:
    prefix, _, name = module.rpartition(".")
    neighbours = next((names for names in _FUSED if name in names), (name,))
    return len({kinds.get(f"{prefix}.{neighbour}") for neighbour in neighbours if neighbour in known}) == 1

"""GGUF files made of Hugging Face checkpoints, as llama.cpp's converter makes them, with its own package."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from . import gguf_hybrids, gguf_states

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    **gguf_states.ARCHITECTURES,
}
# Of these llama.cpp rotates neighbours, not halves of a head.
_INTERLEAVED = ("llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "smollm3")
Array = np.ndarray[Any, Any]
# What is added to a writer beside the model itself, such as a vocabulary.
Extra = Callable[[gguf.GGUFWriter], None]
# Where in a block its scales are, float16 each.
_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
}
# What the second scale, of minima, is to the first, so that weights are about zero.
_MINIMA = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
# Of IQ1_M each of these bytes has four of the scale's bits, above four of another kind.
_SCALE_NIBBLES = (49, 51, 53, 55)


@dataclass
class GgufFile:
    """What was written. `dequantized`: a checkpoint's tensors as llama.cpp's package reads them again."""

    path: Path
    dequantized: dict[str, Array] = field(default_factory=dict)


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    extra: Iterable[Extra] = (),
    kinds: dict[str, str] | None = None,
    num_parts: int = 1,
) -> GgufFile:
    """A checkpoint's GGUF file, its matrices of this type; `kinds`: other types by a part of the tensors' names."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _architecture(config)
    weights = _merged_experts(load_file(folder / "model.safetensors"))
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=-(-len(weights) // num_parts) if num_parts > 1 else 0
    )
    _add_sizes(writer, config)
    _add_rope(writer, config)
    for add in extra:
        add(writer)
    written = GgufFile(path)
    (number_of,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number_of, gguf_hybrids.num_layers(config))
    for name, weight in sorted(weights.items()):
        own = next((each for part, each in (kinds or {}).items() if part in name), kind)
        written.dequantized[name] = np.empty(weight.shape, np.float32)
        for part, places in _stored_parts(config, name, np.arange(weight.size).reshape(weight.shape)):
            number = gguf.GGMLQuantizationType[own if _is_matrix(config, name, places) else "F32"]
            stored = _numbers(config, name, weight.astype(np.float32).ravel()[places], is_stored=True)
            raw = _blocks(stored, number)
            # No Gemma has a head of its own, but those of the tests, which would repeat themselves without.
            place = "output" if part == "lm_head" else names.get_name(part)
            is_bare = part.endswith(".weight") or place.endswith(("ssm_a", "ssm_d"))
            ending = "" if is_bare else ".bias" if name.endswith("bias") else ".weight"
            writer.add_tensor(place + ending, raw, raw_dtype=number)
            read = gguf.dequantize(raw, number).reshape(stored.shape)
            written.dequantized[name].ravel()[places] = _numbers(config, name, read, is_stored=False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def byte_level_vocabulary(fast: Tokenizer, pre: str, special: tuple[str, str] = ("<s>", "</s>")) -> Extra:
    """The vocabulary of a tokenizer.json as llama.cpp has it; `special`: the tokens that begin and end a text."""
    ids = fast.get_vocab(with_added_tokens=True)
    added = fast.get_added_tokens_decoder()
    types = {
        number: gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
        for number, token in added.items()
    }
    merges = json.loads(fast.to_str())["model"]["merges"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(ids, key=ids.__getitem__))
        writer.add_token_types([types.get(number, gguf.TokenType.NORMAL) for number in range(len(ids))])
        writer.add_token_merges([" ".join(pair) for pair in merges])
        for name, token in zip(("bos", "eos"), special, strict=True):
            getattr(writer, f"add_{name}_token_id")(ids[token])

    return add


def write_dequantized(folder: Path, file: GgufFile, target: Path) -> Path:
    """The checkpoint of `folder` with the weights that the file has."""
    target.mkdir()
    weights = {}
    for name in load_file(folder / "model.safetensors"):
        if (weight := file.dequantized.get(name)) is None:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            weight = file.dequantized[f"{before}.experts.{rest}"][int(number)]
        weights[name] = np.ascontiguousarray(weight)
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def _architecture(config: dict[str, Any]) -> str:
    if config["model_type"] in gguf_hybrids.MODEL_TYPES:
        return gguf_hybrids.architecture(config)
    return ARCHITECTURES[config["model_type"]]


def _is_matrix(config: dict[str, Any], name: str, places: Array) -> bool:
    if config["model_type"] in gguf_hybrids.MODEL_TYPES and gguf_hybrids.is_small(name):
        return False
    return places.ndim > 1 and "conv1d" not in name


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    is_hybrid = config["model_type"] in gguf_hybrids.MODEL_TYPES
    writer.add_block_count(gguf_hybrids.num_layers(config) + config.get("mtp_num_hidden_layers", 0))
    # Some mixtures have none.
    if inner := gguf_hybrids.inner_sizes(config) if is_hybrid else config.get("intermediate_size"):
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(gguf_hybrids.kv_heads(config) if is_hybrid else config["num_key_value_heads"])
    norm_eps = next(config[name] for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if name in config)
    writer.add_layer_norm_rms_eps(norm_eps)
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if inner := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(inner)
    if guessing := config.get("mtp_num_hidden_layers"):
        writer.add_uint32(f"{writer.arch}.nextn_predict_layers", guessing)
    if config["model_type"] in gguf_states.ARCHITECTURES:
        gguf_states.add_sizes(writer, config)
    if is_hybrid:
        gguf_hybrids.add_sizes(writer, config)
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if config["model_type"] in ("gemma3_text", "olmo3"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config["model_type"].startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    match rope["rope_type"]:
        case "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
        case "longrope":
            original = config["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
            for length in ("short", "long"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
        case "linear" | "yarn":
            kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
            writer.add_rope_scaling_type(kinds[rope["rope_type"]])
            writer.add_rope_scaling_factor(rope["factor"])
            if original := rope.get("original_max_position_embeddings"):
                writer.add_rope_scaling_orig_ctx_len(original)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Array:
    """What frequencies are divided by, written as llama.cpp's converter has it."""
    factors = []
    original = rope["original_max_position_embeddings"]
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / head_dim)
        low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            width = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / wavelength - rope["low_freq_factor"]) / width
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _merged_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """Experts' matrices as one tensor, under the names that llama.cpp knows those by."""
    merged: dict[str, Any] = {}
    for name, weight in tensors.items():
        before, mark, after = name.partition(".experts.")
        if not mark or not after[0].isdigit():
            merged[name] = weight
            continue
        number, _, rest = after.partition(".")
        merged.setdefault(f"{before}.experts.{rest}", {})[int(number)] = weight
    return {
        name: np.stack([each[index] for index in range(len(each))]) if isinstance(each, dict) else each
        for name, each in merged.items()
    }


def _heads(config: dict[str, Any], name: str) -> int | None:
    """How many heads' rows llama.cpp interleaves in this tensor."""
    if _architecture(config) not in _INTERLEAVED:
        return None
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])


def _stored_parts(config: dict[str, Any], name: str, weight: Array) -> Iterable[tuple[str, Array]]:
    """A checkpoint's tensor as the tensors that llama.cpp makes of it, by names that its package knows."""
    if config["model_type"] in gguf_states.ARCHITECTURES:
        return gguf_states.stored_parts(config, name, weight)
    heads, module = _heads(config, name), name.removesuffix(".weight").removesuffix(".bias")
    if heads is None and config["model_type"] in gguf_hybrids.MODEL_TYPES:
        return gguf_hybrids.stored_parts(config, name, weight)
    if heads is None:
        return [(module, weight)]
    return [(module, weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape))]


def _numbers(config: dict[str, Any], name: str, numbers: Array, *, is_stored: bool) -> Array:
    """What the file has for a checkpoint's numbers, or the other way round."""
    if config["model_type"] in gguf_states.ARCHITECTURES:
        convert = gguf_states.numbers_as_stored if is_stored else gguf_states.numbers_as_trained
        return convert(name, numbers)
    if config["model_type"] in gguf_hybrids.MODEL_TYPES:
        convert_of = gguf_hybrids.numbers_as_stored if is_stored else gguf_hybrids.numbers_as_trained
        return convert_of(config, name, numbers)
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return numbers + 1 if is_stored else numbers - 1
    return numbers


def _blocks(weight: Array, number: Any) -> Array:
    """The package quantises to the simple types; of the others there are random blocks, of about the right size."""
    if number.name not in (*_SCALES, "IQ1_M"):
        return gguf.quantize(weight, number)
    generator = np.random.default_rng(weight.shape[-1])
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = generator.integers(0, 256, (weight.size // num_weights, num_bytes), dtype=np.uint8)
    if number.name in ("Q4_K", "Q5_K"):
        # Each scale's minimum is as large as it is, or weights far from zero would make rows alike.
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    _set_scales(blocks, number.name, 2e-5)
    raw = blocks.reshape(*weight.shape[:-1], -1)
    # Scaled such that the weights are as large as those that they stand for.
    factor = weight.std() / gguf.dequantize(raw, number).std()
    _set_scales(blocks, number.name, 2e-5 * factor)
    return raw


def _set_scales(blocks: Array, kind: str, scale: float) -> None:
    bits = np.float16(scale).reshape(1).view(np.uint16)
    for at, factor in zip(_SCALES.get(kind, ()), (1.0, _MINIMA.get(kind, 1.0)), strict=False):
        blocks[:, at : at + 2] = np.float16(scale * factor).reshape(1).view(np.uint8)
    for place, at in enumerate(_SCALE_NIBBLES if kind == "IQ1_M" else ()):
        blocks[:, at] = blocks[:, at] & 15 | (bits >> 4 * place & 15) << 4

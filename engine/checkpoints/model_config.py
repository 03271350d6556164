"""What a model is: its `config.json`, with the families' differences resolved into plain fields. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ModelError
from . import glm_families, layer_norm_families, llama_families, mixture_families, other_families, qwen_next, qwen_vl
from .gpt_oss import read_gpt_oss
from .model_folder import Raw, config_file, read_config, read_stop_ids
from .model_shape import DecoderNames, FalconConfig, LinearAttentionConfig, MlpNames, ModelShape, MoeConfig
from .quantization_config import read_quantization


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
        read = _READERS[_architecture(folder, raw)]
        raw["eos_token_id"] = read_stop_ids(folder, raw)
        try:
            quantization = read_quantization(raw)
            shape = replace(_without_idle_windows(read(folder, raw)), quantization=quantization)
            _check(shape)
        except ModelError as error:
            raise ModelError(f"{config_file(folder)}: {error}") from error
        except KeyError as missing:
            raise ModelError(f"{config_file(folder)} has no field {missing}") from missing
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"{config_file(folder)} has a field of the wrong kind: {error}") from error
        return cls(**vars(shape))


def _architecture(folder: Path, raw: Raw) -> str:
    """Which of the readers fits. Refuses what none of them could make sense of."""
    names = raw.get("architectures") or []
    name = next((str(name) for name in names if name in _READERS), None)
    if name is None:
        found = ", ".join(map(str, names)) or raw.get("model_type") or "none named"
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"unsupported architecture {found} in {folder}; supported: {supported}")
    return name


_READERS: dict[str, Callable[[Path, Raw], ModelShape]] = {
    "LlamaForCausalLM": llama_families.read_llama,
    "MistralForCausalLM": llama_families.read_mistral,
    "MinistralForCausalLM": llama_families.read_mistral,
    "Ministral3ForCausalLM": llama_families.read_ministral3,
    "MixtralForCausalLM": mixture_families.read_mixtral,
    "Qwen2ForCausalLM": llama_families.read_qwen2,
    "Qwen2MoeForCausalLM": mixture_families.read_qwen2_moe,
    "Qwen2VLForConditionalGeneration": qwen_vl.read_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl.read_qwen2_5_vl,
    "Qwen3ForCausalLM": llama_families.read_qwen3,
    "Qwen3VLForConditionalGeneration": qwen_vl.read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen_vl.read_qwen3_vl_moe,
    "Qwen3MoeForCausalLM": mixture_families.read_qwen3_moe,
    "Qwen3NextForCausalLM": qwen_next.read_qwen3_next,
    "Qwen3_5ForCausalLM": qwen_next.read_qwen3_5_text,
    "Qwen3_5MoeForCausalLM": qwen_next.read_qwen3_5_text,
    "Qwen3_5ForConditionalGeneration": qwen_vl.read_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen_vl.read_qwen3_5,
    "Glm4MoeForCausalLM": glm_families.read_glm4_moe,
    "GlmForCausalLM": glm_families.read_glm,
    "Glm4ForCausalLM": glm_families.read_glm4,
    "Ernie4_5ForCausalLM": glm_families.read_ernie,
    "Ernie4_5_MoeForCausalLM": glm_families.read_ernie_moe,
    "MiniMaxM2ForCausalLM": glm_families.read_minimax_m2,
    "SolarOpenForCausalLM": glm_families.read_solar_open,
    "Dots1ForCausalLM": glm_families.read_dots1,
    "Phi3ForCausalLM": llama_families.read_phi3,
    "Gemma2ForCausalLM": other_families.read_gemma2,
    "Gemma3ForCausalLM": other_families.read_gemma3,
    "Gemma3ForConditionalGeneration": other_families.read_text_only,
    "Mistral3ForConditionalGeneration": other_families.read_text_only,
    "GraniteForCausalLM": llama_families.read_granite,
    "GraniteMoeForCausalLM": mixture_families.read_granite_moe,
    "GraniteMoeHybridForCausalLM": llama_families.read_granite4,
    "SmolLM3ForCausalLM": llama_families.read_smollm3,
    "ArceeForCausalLM": llama_families.read_arcee,
    "OlmoeForCausalLM": mixture_families.read_olmoe,
    "ApertusForCausalLM": llama_families.read_apertus,
    "HunYuanDenseV1ForCausalLM": llama_families.read_hunyuan,
    "HunYuanMoEV1ForCausalLM": mixture_families.read_hunyuan_moe,
    "SeedOssForCausalLM": llama_families.read_seed_oss,
    "InternLM3ForCausalLM": llama_families.read_internlm3,
    "Olmo2ForCausalLM": other_families.read_olmo2,
    "Olmo3ForCausalLM": other_families.read_olmo3,
    "Exaone4ForCausalLM": other_families.read_exaone4,
    "CohereForCausalLM": layer_norm_families.read_cohere,
    "Cohere2ForCausalLM": layer_norm_families.read_cohere2,
    "StableLmForCausalLM": layer_norm_families.read_stablelm,
    "Starcoder2ForCausalLM": layer_norm_families.read_starcoder2,
    "NemotronForCausalLM": layer_norm_families.read_nemotron,
    "FalconForCausalLM": other_families.read_falcon,
    "GptOssForCausalLM": read_gpt_oss,
}
SUPPORTED_ARCHITECTURES = tuple(_READERS)
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
    windows = tuple(window if window and window < context else None for window in config.sliding_windows)
    return replace(config, sliding_windows=windows)


def _check(config: ModelShape) -> None:
    """Refuse numbers that cannot be, or contradict each other."""
    for name in _SIZES:
        if (size := getattr(config, name)) < 1:
            raise ModelError(f"{name} must be at least 1, not {size}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads {config.num_attention_heads} is no multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    if (linear := config.linear_attention) is not None:
        _check_linear(linear)
    if config.moe is not None and config.moe.num_experts_per_tok > config.moe.num_experts:
        raise ModelError(f"num_experts_per_tok is {config.moe.num_experts_per_tok} of {config.moe.num_experts} experts")
    if config.quantization is not None and config.quantization.method == "mxfp4" and config.gpt_oss is None:
        raise ModelError("quantization_config (mxfp4) is supported for gpt-oss alone: use the model in another format")
    for rope in config.ropes:
        lengths, expected = (len(rope.short_factor), len(rope.long_factor)), config.rotary_dim // 2
        if rope.rope_type == "longrope" and lengths != (expected, expected):
            raise ModelError(
                f"short_factor and long_factor have {lengths[0]} and {lengths[1]} entries where there are {expected} "
                "frequencies"
            )


def _check_linear(linear: LinearAttentionConfig) -> None:
    sizes = {
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{name} must be at least 1, not {size}")
    if linear.num_heads % linear.num_key_heads:
        raise ModelError(
            f"linear_num_value_heads {linear.num_heads} is no multiple of linear_num_key_heads {linear.num_key_heads}"
        )
    if linear.conv_width < 2:
        raise ModelError(f"linear_conv_kernel_dim must be at least 2, not {linear.conv_width}")
    if all(linear.layers):
        raise ModelError("layer_types has no full_attention: supported are models of which some layers attend")


__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "DecoderNames",
    "FalconConfig",
    "LinearAttentionConfig",
    "MlpNames",
    "ModelConfig",
    "MoeConfig",
]

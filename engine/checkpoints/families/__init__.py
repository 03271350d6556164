"""What each family's `config.json` says, by the architecture that it names. Free of torch."""

from collections.abc import Callable
from pathlib import Path

from ..model_folder import Raw
from ..model_shape import ModelShape
from . import deepseek, glm, gpt_oss, layer_norm, llama, mixtures, others, qwen_next, qwen_vl

READERS: dict[str, Callable[[Path, Raw], ModelShape]] = {
    "LlamaForCausalLM": llama.read_llama,
    "MistralForCausalLM": llama.read_mistral,
    "MinistralForCausalLM": llama.read_mistral,
    "Ministral3ForCausalLM": llama.read_ministral3,
    "MixtralForCausalLM": mixtures.read_mixtral,
    "Qwen2ForCausalLM": llama.read_qwen2,
    "Qwen2MoeForCausalLM": mixtures.read_qwen2_moe,
    "Qwen2VLForConditionalGeneration": qwen_vl.read_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl.read_qwen2_5_vl,
    "Qwen3ForCausalLM": llama.read_qwen3,
    "Qwen3VLForConditionalGeneration": qwen_vl.read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen_vl.read_qwen3_vl_moe,
    "Qwen3MoeForCausalLM": mixtures.read_qwen3_moe,
    "Qwen3NextForCausalLM": qwen_next.read_qwen3_next,
    "Qwen3_5ForCausalLM": qwen_next.read_qwen3_5_text,
    "Qwen3_5MoeForCausalLM": qwen_next.read_qwen3_5_text,
    "Qwen3_5ForConditionalGeneration": qwen_vl.read_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen_vl.read_qwen3_5,
    "DeepseekV2ForCausalLM": deepseek.read_deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.read_deepseek_v3,
    "Glm4MoeLiteForCausalLM": deepseek.read_glm4_moe_lite,
    "Glm4MoeForCausalLM": glm.read_glm4_moe,
    "GlmForCausalLM": glm.read_glm,
    "Glm4ForCausalLM": glm.read_glm4,
    "Ernie4_5ForCausalLM": glm.read_ernie,
    "Ernie4_5_MoeForCausalLM": glm.read_ernie_moe,
    "MiniMaxM2ForCausalLM": glm.read_minimax_m2,
    "SolarOpenForCausalLM": glm.read_solar_open,
    "Dots1ForCausalLM": glm.read_dots1,
    "Phi3ForCausalLM": llama.read_phi3,
    "Gemma2ForCausalLM": others.read_gemma2,
    "Gemma3ForCausalLM": others.read_gemma3,
    "Gemma3ForConditionalGeneration": others.read_text_only,
    "Mistral3ForConditionalGeneration": others.read_text_only,
    "GraniteForCausalLM": llama.read_granite,
    "GraniteMoeForCausalLM": mixtures.read_granite_moe,
    "GraniteMoeHybridForCausalLM": llama.read_granite4,
    "SmolLM3ForCausalLM": llama.read_smollm3,
    "ArceeForCausalLM": llama.read_arcee,
    "OlmoeForCausalLM": mixtures.read_olmoe,
    "ApertusForCausalLM": llama.read_apertus,
    "HunYuanDenseV1ForCausalLM": llama.read_hunyuan,
    "HunYuanMoEV1ForCausalLM": mixtures.read_hunyuan_moe,
    "SeedOssForCausalLM": llama.read_seed_oss,
    "InternLM3ForCausalLM": llama.read_internlm3,
    "Olmo2ForCausalLM": others.read_olmo2,
    "Olmo3ForCausalLM": others.read_olmo3,
    "Exaone4ForCausalLM": others.read_exaone4,
    "CohereForCausalLM": layer_norm.read_cohere,
    "Cohere2ForCausalLM": layer_norm.read_cohere2,
    "StableLmForCausalLM": layer_norm.read_stablelm,
    "Starcoder2ForCausalLM": layer_norm.read_starcoder2,
    "NemotronForCausalLM": layer_norm.read_nemotron,
    "FalconForCausalLM": others.read_falcon,
    "GptOssForCausalLM": gpt_oss.read_gpt_oss,
}

__all__ = ["READERS"]

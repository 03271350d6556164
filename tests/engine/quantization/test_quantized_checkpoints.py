"""Quantised checkpoints answer as what their weights stand for does, and what cannot be read is named."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma4TextConfig,
    GlmConfig,
    LlamaConfig,
    Mistral3Config,
    Mistral4Config,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
)

from headrace import LLM, SamplingParams
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.errors import ConfigError, ModelError
from headrace.kernels.native import native_library

from ..conftest import save_random_model
from .quantization_configs import AWQ, BYTE, GPTQ, HEAD, INT4, MIXED, MODELOPT, NVFP4, compressed
from .quantized_formats import FP8, Tensors, Writer, awq, gptq, modelopt_fp8, nvfp4, packed, scaled

# Sizes that are multiples of eight, which words hold, and not of blocks or, but for the hidden size, of groups.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    # Of whole groups of 16.
    "mixtral-176": MixtralConfig(**SIZES | {"intermediate_size": 176}, num_local_experts=3, num_experts_per_tok=2),
    "phi3": Phi3Config(**SIZES, pad_token_id=0, eos_token_id=1),
    "glm": GlmConfig(**SIZES, head_dim=16, pad_token_id=0, eos_token_id=1),
    "deepseek-v3": DeepseekV3Config(
        **SIZES,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        moe_intermediate_size=168,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "mistral4": Mistral3Config(
        text_config=Mistral4Config(
            **SIZES | {"num_key_value_heads": 4},
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            moe_intermediate_size=40,
            n_routed_experts=4,
            num_experts_per_tok=2,
        ),
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        image_token_index=95,
        tie_word_embeddings=False,
    ),
    "gemma4": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=16,
        global_head_dim=32,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=64,
        vocab_size_per_layer_input=96,
        tie_word_embeddings=False,
    ),
    "qwen3.5": Qwen3_5TextConfig(
        **SIZES,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        tie_word_embeddings=False,
    ),
}
PROMPTS = [[5, 6, 7], [9] * 20, list(range(1, 40))]
LAYERS = r"model\.layers\..*(proj|experts\.\d+\.w\d)$"
OF_LATENTS = r"(language_model\.)?model\.layers\..*(proj|mqa)$"
# Of layers with states all but what their steps' sizes come from.
WITH_STATES = r"model\.layers\..*(proj|in_proj_qkv|in_proj_z)$"


def mixed(weight: Tensor) -> tuple[Tensors, Tensor]:
    """In FP8 what is no expert's and not of the head."""
    return (nvfp4() if {96, 176} & set(weight.shape) else modelopt_fp8("tensor"))(weight)


# The family, the writer, quantization_config, and which modules it is for.
FORMATS: dict[str, tuple[str, Writer, dict[str, Any], str]] = {
    "gptq": ("llama", gptq(32), GPTQ, LAYERS),
    "gptq of a tied model with biases": ("qwen2", gptq(32, with_index=False), GPTQ, LAYERS),
    "gptq with zeros": ("llama", gptq(64, False), {**GPTQ, "group_size": 64, "sym": False}, LAYERS),
    "gptq in any order": (
        "llama",
        gptq(32, False, desc_act=True),
        {**GPTQ, "group_size": 32, "sym": False, "desc_act": True},
        LAYERS,
    ),
    "gptq of whole rows, second format": (
        "llama",
        gptq(-1, False, less_one=0),
        {**GPTQ, "group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
        LAYERS,
    ),
    "gptq that says the wrong format": ("llama", gptq(32, less_one=0), {**GPTQ, "checkpoint_format": "gptq"}, LAYERS),
    "gptq with its head": ("llama", gptq(32), {**GPTQ, "lm_head": True}, rf"{LAYERS}|lm_head$"),
    "gptq without a layer": (
        "llama",
        gptq(32),
        {**GPTQ, "dynamic": {"lm_head": {}, r"-:model\.layers\.1\.": {}, r"+:.*": {"bits": 4}}},
        r"model\.layers\.0\..*proj$",
    ),
    "gptq of some modules": (
        "llama",
        gptq(32),
        {**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]},
        r".*mlp\..*_proj$",
    ),
    "gptq of fused projections": ("phi3", gptq(32), GPTQ, LAYERS),
    "gptq of pairs that are rotated": ("glm", gptq(32, False), {**GPTQ, "sym": False}, LAYERS),
    "gptq of layers with states": ("qwen3.5", gptq(32), GPTQ, WITH_STATES),
    "awq": ("llama", awq(32), AWQ, LAYERS),
    "awq of experts": ("mixtral", awq(32), {**AWQ, "modules_to_not_convert": ["gate"]}, LAYERS),
    "fp8": (
        "llama",
        scaled(FP8, "tensor", input_scale=torch.tensor(0.5)),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["model.layers.0.mlp.down_proj"]},
        r"model\.layers\.(?!0\.mlp\.down).*proj$",
    ),
    # As transformers writes it, which says that there are no blocks.
    "fp8 without blocks": (
        "llama",
        scaled(FP8, "tensor", "weight_scale_inv", activation_scale=torch.tensor(0.5)),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        LAYERS,
    ),
    "fp8 in blocks": (
        "llama",
        scaled(FP8, "block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        LAYERS,
    ),
    "fp8 of pairs that are rotated": (
        "glm",
        scaled(FP8, "block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        LAYERS,
    ),
    "fp8 of latents": (
        "deepseek-v3",
        scaled(FP8, "block", "weight_scale_inv", block=16),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]},
        OF_LATENTS,
    ),
    # As it is published.
    "fp8 of stacked experts": (
        "mistral4",
        scaled(FP8, "tensor", "weight_scale_inv", activation_scale=torch.tensor(0.5)),
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
            "weight_block_size": None,
        },
        OF_LATENTS,
    ),
    "gptq of latents": ("deepseek-v3", gptq(32, False), {**GPTQ, "sym": False}, OF_LATENTS),
    "fp8 of layers with states": (
        "qwen3.5",
        scaled(FP8, "block", "weight_scale_inv"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b"],
        },
        WITH_STATES,
    ),
    "compressed int4": ("llama", packed(32, True), compressed("pack-quantized", INT4, HEAD), LAYERS),
    "compressed int4 of layers with inputs of their own": (
        "gemma4",
        packed(32, True),
        compressed("pack-quantized", INT4, HEAD),
        r"model\.(layers\..*(proj|per_layer_(input_gate|projection))|per_layer_model_projection)$",
    ),
    "compressed int4 with zeros": (
        "qwen2",
        packed(None, False),
        compressed("pack-quantized", {**INT4, "symmetric": False, "strategy": "channel", "group_size": None}, HEAD),
        LAYERS,
    ),
    "compressed int4 in any order": (
        "mixtral",
        packed(32, True, with_order=True),
        compressed("pack-quantized", {**INT4, "actorder": "group"}, [*HEAD, "re:.*gate$"]),
        LAYERS,
    ),
    "compressed int4 with its head": (
        "llama",
        packed(32, False),
        compressed("pack-quantized", {**INT4, "symmetric": False}, [r"re:.*layers\.0\..*"]),
        r"model\.layers\.1\..*proj$|lm_head$",
    ),
    "compressed fp8": ("llama", scaled(FP8, "channel"), compressed("float-quantized", BYTE, HEAD), LAYERS),
    "compressed fp8 in blocks": (
        "llama",
        scaled(FP8, "block", block=64),
        compressed("float-quantized", {**BYTE, "strategy": "block", "block_structure": [64, 64]}, HEAD),
        LAYERS,
    ),
    "compressed nvfp4": (
        "mixtral-176",
        nvfp4("weight_packed", "weight_global_scale", divides=True),
        compressed(
            "nvfp4-pack-quantized",
            {**INT4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            [*HEAD, "re:.*gate$"],
        ),
        LAYERS,
    ),
    "modelopt fp8": (
        "llama",
        modelopt_fp8("tensor"),
        {**MODELOPT, "quant_algo": "FP8", "ignore": [*HEAD, "model.layers.0.mlp*"], "kv_cache_scheme": {"num_bits": 8}},
        r"model\.layers\.(?!0\.mlp\.).*proj$",
    ),
    "modelopt fp8 of channels": (
        "llama",
        modelopt_fp8("channel"),
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        LAYERS,
    ),
    "modelopt fp8 in blocks": ("llama", modelopt_fp8("block"), {**MODELOPT, "quant_algo": "fp8_pb_wo"}, LAYERS),
    "modelopt nvfp4": ("llama", nvfp4(), NVFP4, r"model\.layers\..*(?<!down)_proj$"),
    "modelopt nvfp4 of pairs that are rotated": ("glm", nvfp4(), NVFP4, r"model\.layers\..*(?<!down)_proj$"),
    "modelopt of several kinds": (
        "mixtral-176",
        mixed,
        MIXED,
        r"model\.layers\.0\.self_attn.*proj$|model\.layers\.1\..*experts.*|lm_head$",
    ),
    "compressed int8": (
        "llama",
        scaled(torch.int8, "channel"),
        compressed("int-quantized", {**BYTE, "type": "int"}, HEAD),
        LAYERS,
    ),
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a random model of a family, once."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        config = FAMILIES[family]
        save_random_model(
            config, folder, AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        )
        return folder

    return make


def write(folder: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    """A copy of a model with other tensors."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def pair(base: Callable[[str], Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Writes a checkpoint in one of the formats, and one with the weights that it stands for."""

    def make(name: str) -> tuple[Path, Path]:
        family, writer, quantization, modules = FORMATS[name]
        quantized: Tensors = {}
        plain: Tensors = {}
        for tensor_name, tensor in load_file(base(family) / "model.safetensors").items():
            module = tensor_name.removesuffix(".weight")
            if re.match(modules, module) and tensor.ndim == 2:
                parts, plain[tensor_name] = writer(tensor)
                quantized.update({f"{module}.{suffix}": part for suffix, part in parts.items()})
            elif re.match(modules, module):
                stacked, weights = zip(*map(writer, tensor), strict=True)
                plain[tensor_name] = torch.stack(weights)
                for suffix in stacked[0]:
                    stacked_name = f"{module}_{suffix.removeprefix('weight_')}".removesuffix("_weight")
                    quantized[stacked_name] = torch.stack([parts[suffix] for parts in stacked])
            else:
                plain[tensor_name] = quantized[tensor_name] = tensor
        assert len(quantized) > len(plain)
        folders = [Path(copytree(base(family), tmp_path / kind)) for kind in ("quantized", "plain")]
        return write(folders[0], quantized, quantization), write(folders[1], plain, None)

    return make


def load(folder: Path, dtype: str = "float32", **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, dtype=dtype, num_gpu_blocks_override=32, **options)


def greedy(folder: Path, **options: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = load(folder, **options).generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    # What fails has none.
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_are_those_of_the_weights(name, pair):
    quantized, plain = pair(name)
    # In float16 int8 weights are dequantised too; in float32 their activations may be quantised.
    dtype = "float16" if name == "compressed int8" else "float32"
    assert greedy(quantized, dtype=dtype) == greedy(plain, dtype=dtype)


def test_in_files_with_the_names_of_modules(pair):
    """As transformers calls them, but writes into no file."""
    quantized, plain = pair("fp8 of stacked experts")
    tensors = load_file(quantized / "model.safetensors")
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
    save_file(
        {re.sub("|".join(names), lambda found: names[found[0]], name): each for name, each in tensors.items()},
        quantized / "model.safetensors",
    )
    assert greedy(quantized) == greedy(plain)


def test_they_are_not_those_of_the_weights_before(pair, base):
    assert greedy(pair("gptq")[0]) != greedy(base("llama"))


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
def test_int8_is_multiplied_in_int8_and_stays_near(pair):
    exact, rounded = (prompt_logprobs(folder) for folder in reversed(pair("compressed int8")))
    error = (exact - rounded).std() / exact.std()
    assert 0 < error < 0.15


def prompt_logprobs(folder: Path) -> Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = load(folder).generate([{"prompt_token_ids": PROMPTS[2]}], params)[0]
    found = zip(PROMPTS[2], output.prompt_logprobs or [], strict=True)
    return torch.tensor([each[token].logprob for token, each in found if each is not None])


@pytest.mark.parametrize(
    "name",
    [
        "gptq in any order",
        "awq of experts",
        "compressed int4 with zeros",
        "fp8",
        "compressed int8",
        "compressed nvfp4",
        "modelopt nvfp4",
    ],
)
def test_random_weights_need_no_checkpoint(name, pair):
    folder, _ = pair(name)
    (folder / "model.safetensors").unlink()
    tokens = greedy(folder, load_format="dummy")
    assert tokens == greedy(folder, load_format="dummy")
    assert len({token for each in tokens for token in each}) > 5


QUERY = "model.layers.0.self_attn.q_proj"
DAMAGES: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "a missing tensor": ("gptq", lambda t: t.pop(f"{QUERY}.qzeros"), f"lacks the tensor {QUERY}.qzeros"),
    "an order that is missing": (
        "gptq in any order",
        lambda t: t.pop(f"{QUERY}.g_idx"),
        f"lacks the tensor {QUERY}.g_idx",
    ),
    "groups of other sizes": (
        "gptq in any order",
        lambda t: t[f"{QUERY}.g_idx"].fill_(0),
        f"{QUERY}: g_idx does not put 32 inputs into each group",
    ),
    "orders that differ": (
        "gptq in any order",
        lambda t: t.update({f"{QUERY}.g_idx": t[f"{QUERY}.g_idx"].flip(0).contiguous()}),
        "g_idx differs between model.layers.0.self_attn.q_proj, ",
    ),
    "a group size that is another": (
        "awq",
        lambda t: t.update({f"{QUERY}.scales": t[f"{QUERY}.scales"][:1].clone()}),
        rf"tensor {QUERY}.scales in .* has shape \(1, 64\); config.json asks for \(2, 64\)",
    ),
    "a weight that is not quantised": (
        "fp8",
        lambda t: t.update({f"{QUERY}.weight": t[f"{QUERY}.weight"].bfloat16()}),
        f"tensor {QUERY}.weight in .* has dtype bfloat16; quantization_config in config.json asks for float8_e4m3fn",
    ),
    "a weight that is quantised where none should be": (
        "fp8",
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(FP8)}),
        "tensor lm_head.weight in .* has dtype float8_e4m3fn; .* asks for float32",
    ),
    "another shape": (
        "compressed int4",
        lambda t: t[f"{QUERY}.weight_shape"].add_(1),
        rf"{QUERY}: weight_shape is \(65, 65\); config.json asks for \(64, 64\)",
    ),
    "a tensor too many": (
        "awq",
        lambda t: t.update({f"{QUERY}.weight": torch.ones(3)}),
        f"holds a tensor {QUERY}.weight",
    ),
}


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_does_not_fit_is_named(name, damage, message, pair):
    folder, _ = pair(name)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_modelopts_own_file_says_the_same(pair):
    """It was alone before `config.json` said it too."""
    folder, _ = pair("modelopt of several kinds")
    expected = ModelConfig.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_pretrained(folder).quantization is None
    own = {"quant_algo": said["quant_algo"], "exclude_modules": said["ignore"], "kv_cache_quant_algo": "FP8"}
    own["quantized_layers"] = said["quantized_layers"]
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": said["producer"], "quantization": own}))
    assert ModelConfig.from_pretrained(folder) == expected
    of_keys = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(of_keys))
    quantization = ModelConfig.from_pretrained(folder).quantization
    assert quantization is not None
    assert quantization.scheme([QUERY]) is None
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(
        ModelError, match=r"/hf_quant_config\.json: quantization_config \(modelopt\): quant_algo is 'W4A8"
    ):
        ModelConfig.from_pretrained(folder)


def test_modules_that_become_one_must_be_quantised_alike(pair):
    folder, _ = pair("compressed int4")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.0.self_attn.k_proj")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="in different ways; they are multiplied as one and must be alike"):
        load(folder)


def test_sizes_that_words_do_not_hold(base, tmp_path):
    folder = Path(copytree(base("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 101, "quantization_config": AWQ}))
    with pytest.raises(ModelError, match=r"mlp\.gate_proj: out_features 101 is no multiple of 8"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**NVFP4, "ignore": []}}))
    with pytest.raises(ModelError, match=r"mlp\.down_proj: in_features 168 is no multiple of 16"):
        load(folder)


def test_a_quantised_checkpoint_is_not_quantised_again(pair):
    with pytest.raises(ConfigError, match=r"the checkpoint's are quantised \(awq\): leave it out"):
        load(pair("awq")[0], quantization="int8")


def test_stacked_experts_with_more_scales_are_refused(pair):
    folder, _ = pair("fp8 of stacked experts")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="gate_up_proj is quantised: stacked experts are supported with one scale"):
        load(folder)

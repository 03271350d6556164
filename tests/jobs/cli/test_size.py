"""`headrace size`: what a model takes, worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import EngineConfig
from headrace.jobs.planning.model_fit import GIB, Fit, Gpu, ModelNeeds

from ..models import write_model_folder
from ..running import assert_refused

# Qwen3-8B's.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


# Qwen3-Next-80B-A3B's.
QWEN_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}
# LFM2-350M's.
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "block_ff_dim": 6656,
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
}
# GLM-4.7-Flash's.
GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "dtype": "bfloat16",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rope_scaling": None,
    "rope_theta": 1000000,
}
# Qwen3-VL-8B's.
QWEN_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "text_config": {**QWEN, "max_position_embeddings": 262144, "rope_scaling": {"mrope_section": [24, 20, 20]}},
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
    },
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("models") / "qwen", **QWEN)


def test_of_a_model_that_everybody_knows(headrace, tmp_path, qwen):
    result = headrace(tmp_path, "size", qwen, "--gpu", "h100", "--gpu", "24GiB", "--json")
    found = json.loads(result.out)
    assert found["parameters"] == 8_190_735_360
    assert found["weight_bytes"] == 2 * found["parameters"]
    assert found["kv_token_bytes"] == 2 * 36 * 8 * 128 * 2
    h100, small = found["gpus"]
    left = int(h100["memory_bytes"] * 0.9) - found["weight_bytes"] - found["beside_bytes"]
    assert h100["kv_bytes"] == left
    assert h100["kv_tokens"] == (left // (16 * 147456) - 1) * 16
    assert h100["num_sequences"] == h100["kv_tokens"] // 40960
    assert (h100["num_gpus_for_one_sequence"], small["num_gpus_for_one_sequence"]) == (1, 2)
    # Each is a worker with the whole model.
    assert h100["num_gpus_for_max_num_seqs"] == -(-256 // h100["num_sequences"])
    printed = headrace(tmp_path, "size", qwen, "--max-model-len", 4096, "--kv-cache-dtype", "fp8").out
    assert "73,728 bytes a token in fp8" in printed
    assert "for 4,096 tokens" in printed
    note = "--tensor-parallel-size says"
    assert note not in printed
    assert note in headrace(tmp_path, "size", qwen, "--gpu", "16GiB").out
    assert note not in headrace(tmp_path, "size", qwen, "--gpu", "h100", "-tp", "2").out


def test_of_a_model_that_reads_images(headrace, tmp_path):
    """GPUs that share one have all of its eyes each; of stages the first alone, which speak to its layers."""
    model = write_model_folder(tmp_path / "qwen-vl", **QWEN_VL)
    found = json.loads(headrace(tmp_path, "size", model, "--gpu", "24GiB", "--gpu", "h200", "--json").out)
    assert found["parameters"] == 8_767_123_696
    small, h200 = found["gpus"]
    # Its largest image takes more than a step.
    assert (small["num_sequences"], small["num_gpus_for_one_sequence"]) == (0, 4)
    assert (h200["num_gpus_for_one_sequence"], h200["num_gpus_for_max_num_seqs"]) == (1, 128)
    sizes = [ModelNeeds.of(model, EngineConfig(tensor_parallel_size=size)).weight_bytes for size in (1, 2, 4)]
    eyes = 2 * (8_767_123_696 - 8_190_735_360)
    # But for the norms.
    assert [size - eyes for size in sizes] == pytest.approx(
        [(sizes[0] - eyes) / share for share in (1, 2, 4)], rel=1e-3
    )
    stages = ModelNeeds.of(model, EngineConfig(pipeline_parallel_size=2))
    assert stages.weight_bytes == pytest.approx((sizes[0] - eyes) / 2 + eyes, rel=1e-3)


def test_what_images_take_beside_the_weights(tmp_path):
    """Of Gemma 3 4B, an image of which is computed in one step, however long its prompt is."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    tower = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "patch_size": 14,
    }
    raw: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "torch_dtype": "bfloat16",
    }
    blind = write_model_folder(tmp_path / "blind", **raw)
    seeing = write_model_folder(tmp_path / "seeing", **raw, vision_config=tower | {"num_attention_heads": 16})

    def beside(model: Path, max_model_len: int, **options: Any) -> int:
        options = {"max_model_len": max_model_len, "enforce_eager": True, **options}
        return ModelNeeds.of(model, EngineConfig(**options)).beside_bytes

    assert beside(blind, 4096) == beside(blind, 131072)
    # Keys and values of four heads in float32, and what they are made of.
    assert beside(seeing, 131072) - beside(seeing, 8192) == (131072 - 8192) * 4 * 256 * (2 * 4 + 2)
    # As many more tokens as an image has, but for one, and 4,096 vectors beside an image's.
    token_bytes = 2 * (3 * 2560 + (8 + 2 * 4) * 256 + 2560 + 2 * 10240 + 2560)
    others = 8192 * 4 * 256 * (2 * 4 + 2) + 2 * 4 * 2**24
    assert beside(seeing, 8192) - beside(blind, 8192) == 255 * token_bytes + others + (4096 + 256) * 2560 * 2
    # Where steps are small the largest image takes most.
    small = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    assert beside(seeing, 300, **small) - beside(blind, 300, **small) > 4096 * 2 * (5 * 1152 + 2 * 4304)


def test_graphs_of_larger_steps_take_more(qwen):
    """All outputs of a layer's products and three rows of its own a token, twice, and a row of parts at four levels."""
    small, large = (ModelNeeds.of(qwen, EngineConfig(cuda_graph_sizes=(size,))) for size in (1, 2048))
    token_bytes = 2 * (3 * 4096 + 6144 + 4096 + 2 * 12288 + 4096)
    assert large.beside_bytes - small.beside_bytes == 2047 * (2 * token_bytes + 4 * 4 * 32 * (128 + 1))


def test_of_a_model_that_gpus_share(tmp_path, qwen):
    alone, shared = (ModelNeeds.of(qwen, EngineConfig(tensor_parallel_size=size)) for size in (1, 2))
    # But for the norms, which each has.
    assert abs(shared.weight_bytes - alone.weight_bytes / 2) < 2**20
    assert (shared.parameters, shared.kv_token_bytes) == (alone.parameters, alone.kv_token_bytes // 2)
    small = Gpu.of("16GiB")
    assert (Fit(small, alone).num_sequences, Fit(small, alone).num_gpus(1)) == (0, 2)
    num_sequences = Fit(small, shared).num_sequences
    assert num_sequences > 0
    assert Fit(small, shared).num_gpus(num_sequences) == 2
    assert Fit(small, shared).num_gpus(num_sequences + 1) == 4


def test_of_a_model_with_states_that_gpus_share(tmp_path):
    """Of 36 layers a value head has 128 × 128 floats and, as a key head's query and key do, three tokens before."""
    next_80b = write_model_folder(tmp_path / "qwen3-next", **QWEN_NEXT)
    alone, shared = (ModelNeeds.of(next_80b, EngineConfig(tensor_parallel_size=size)) for size in (1, 4))
    assert alone.parameters == 79_674_391_296
    assert alone.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
    assert shared.state_bytes == alone.state_bytes // 4
    # Its two heads of keys are in two places each.
    assert shared.kv_token_bytes == alone.kv_token_bytes // 2
    h100 = Gpu.of("h100")
    assert (Fit(h100, alone).num_sequences, Fit(h100, alone).num_gpus(1)) == (0, 3)
    assert Fit(h100, shared).num_sequences > 0
    stages = ModelNeeds.of(next_80b, EngineConfig(pipeline_parallel_size=3))
    assert stages.state_bytes == alone.state_bytes // 3


def test_of_a_model_with_small_states(headrace, tmp_path):
    """Of ten layers what two tokens put into them."""
    model = write_model_folder(tmp_path / "lfm2", **LFM2)
    printed = headrace(tmp_path, "size", model, "--gpu", "l4").out
    assert "354,483,968 parameters" in printed
    assert "40.0 KiB of it a state of any length" in printed


def test_of_a_model_that_attends_to_latents(headrace, tmp_path):
    """GLM-4.7-Flash, without what guesses ahead: 53 KiB a token, where keys and values of its heads would take 940."""
    flash = write_model_folder(tmp_path / "glm-flash", **GLM_FLASH)
    hidden, inner, heads, latent = 2048, 1536, 20, 512
    queries = 768 * (hidden + 1) + heads * 256 * 768
    keys_and_values = (latent + 64) * hidden + latent + heads * (192 + 256) * latent
    attention = queries + keys_and_values + hidden * heads * 256
    router = 64 * (hidden + 1)
    experts = router + (64 + 1) * 3 * inner * hidden
    layers = 47 * (attention + 2 * hidden) + 3 * 10240 * hidden + 46 * experts
    needs = ModelNeeds.of(flash, EngineConfig())
    assert needs.parameters == layers + 2 * 154880 * hidden + hidden == 29_943_393_920
    # Routers are in float32.
    assert needs.weight_bytes == 2 * needs.parameters + 2 * 46 * router
    assert needs.kv_token_bytes == 47 * (latent + 64) * 2
    shared, stages = (
        ModelNeeds.of(flash, EngineConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp))
        for tp, pp in ((2, 1), (1, 2))
    )
    assert shared.kv_token_bytes == needs.kv_token_bytes
    assert stages.kv_token_bytes == 24 * (latent + 64) * 2
    printed = headrace(tmp_path, "size", flash, "--max-model-len", 4096, "--gpu", "h200").out
    assert "54,144 bytes a token in bfloat16" in printed


def test_of_a_model_whose_layers_gpus_share(headrace, tmp_path, qwen):
    """The embedding is at one end, the head at the other."""
    alone, stages = (ModelNeeds.of(qwen, EngineConfig(pipeline_parallel_size=size)) for size in (1, 3))
    assert alone.weight_bytes / 3 < stages.weight_bytes < alone.weight_bytes / 2
    assert (stages.parameters, stages.kv_token_bytes) == (alone.parameters, alone.kv_token_bytes // 3)
    assert stages.num_sharing == 3
    # The last stage has the logits of all 256 sequences, three times and more.
    assert stages.beside_bytes > 256 * 151936 * 24
    # Of 36 layers one of five stages has eight.
    uneven = ModelNeeds.of(qwen, EngineConfig(pipeline_parallel_size=5))
    assert uneven.kv_token_bytes == alone.kv_token_bytes * 8 // 36
    assert Fit(Gpu.of("h100"), stages).num_gpus(1) == 3
    assert "of each of 3 GPUs at most" in headrace(tmp_path, "size", qwen, "-pp", "3").out


def test_of_a_model_with_one_that_guesses(headrace, tmp_path, qwen):
    """The draft model has a block of its own for each of the model's; heads have weights alone."""
    draft = write_model_folder(tmp_path / "draft", **QWEN | {"num_hidden_layers": 2, "max_position_embeddings": 4096})
    heads = write_model_folder(tmp_path / "heads", medusa_num_heads=4, medusa_num_layers=1)
    alone, beside = (ModelNeeds.of(folder, EngineConfig()) for folder in (qwen, draft))
    guessed = ModelNeeds.of(qwen, EngineConfig(speculative_config={"model": str(draft)}))
    assert guessed.weight_bytes == alone.weight_bytes + beside.weight_bytes
    assert guessed.kv_token_bytes == alone.kv_token_bytes + beside.kv_token_bytes
    assert guessed.beside_bytes > alone.beside_bytes
    assert (guessed.parameters, guessed.sequence_tokens) == (alone.parameters, alone.sequence_tokens)
    medusa = ModelNeeds.of(qwen, EngineConfig(speculative_config={"method": "medusa", "model": str(heads)}))
    assert medusa.weight_bytes - alone.weight_bytes == 2 * 4 * (4096 * 4096 + 4096 + 151936 * 4096)
    assert medusa.kv_token_bytes == alone.kv_token_bytes
    printed = headrace(tmp_path, "size", qwen, "--speculative-config", json.dumps({"model": str(draft)})).out
    assert (
        f"{guessed.kv_token_bytes:,} bytes a token in bfloat16, {beside.kv_token_bytes:,} of them to guess with"
        in printed
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "h1000"], ["--gpu must be one of h200, h100", "24GiB", "'h1000'"]),
        (["--max-model-len", "50000"], ["--max-model-len 50000 exceeds the model's context of 40960 tokens"]),
        # That is for CPUs.
        (["--quantization", "int8"], ["No such option", "headrace size --help"]),
        (["--dtype", "int3"], ["dtype must be one of"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization must be"]),
        (["-pp", "50"], ["--pipeline-parallel-size=50 must be at most num_hidden_layers=36"]),
        (["--speculative-config", '{"model": "nowhere"}'], ["--speculative-config", "nowhere does not exist"]),
        (["-tp", "5"], ["--tensor-parallel-size=5 must divide num_attention_heads=32"]),
    ],
)
def test_what_can_not_be_is_refused(headrace, tmp_path, qwen, options, words):
    assert_refused(headrace(tmp_path, "size", qwen, *options), *words)


def test_a_model_that_takes_all_of_a_gpu_leaves_nothing():
    sizes: dict[str, Any] = {"kv_token_bytes": 1024, "sequence_tokens": 100, "block_tokens": 16, "utilization": 1.0}
    needs = ModelNeeds(1, "float16", "float16", weight_bytes=3 * GIB, beside_bytes=GIB, **sizes)
    fits = {memory: Fit(Gpu("a GPU", memory * GIB), needs) for memory in (1, 2, 4, 5)}
    assert {memory: fit.num_gpus(1) for memory, fit in fits.items()} == {1: None, 2: 4, 4: 2, 5: 1}
    assert [fit.num_sequences for fit in fits.values()] == [0, 0, 0, (GIB // (16 * 1024) - 1) // 7]

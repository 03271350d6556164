"""Models in GGUF files, against transformers with the same weights."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from headrace.engine.checkpoints.gguf.block_types import BLOCK_TYPES
from headrace.engine.checkpoints.gguf.blocks import dequantized
from headrace.engine.checkpoints.gguf.config import read_cpu_quantization, read_gguf_config
from headrace.engine.checkpoints.gguf.tensors import GgufTensors
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import weight_bytes
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.models import Decoder, load_model
from headrace.engine.models.blocks import LinearPart
from headrace.engine.models.llama import LlamaLayer
from headrace.engine.request import Request
from headrace.engine.sharding.ranks import ProcessRanks
from headrace.kernels.linear import Int4Weight, StoredWeight, supports_int8
from headrace.kernels.linear.grouped import GroupedProduct
from headrace.kernels.linear.int8 import Int8Product
from headrace.kernels.native import has_avx512, native_library

from ..conftest import greedy, save_random_model
from ..families import FAMILIES, ODD_SIZES, PHI3_TOKENS, WITH_STATES
from ..running import greedy_params, run_all, token_ids
from ..state_families import STATE_SIZES
from .gguf_files import GgufFile, write_gguf

CPU = torch.device("cpu")
PROMPT = [(7 * place * place + 3) % 300 for place in range(33)]
EXPERTS = {"moe_intermediate_size": 37, "num_experts": 6, "num_experts_per_tok": 2}
CONFIGS: dict[str, Any] = {
    "llama": FAMILIES["llama-bias-tied-rope3"],
    "mixtral": FAMILIES["mixtral"],
    "qwen2": FAMILIES["qwen2-yarn"],
    "qwen2moe": Qwen2MoeConfig(**ODD_SIZES, **EXPERTS, shared_expert_intermediate_size=45),
    "qwen3": FAMILIES["qwen3"],
    "qwen3moe": Qwen3MoeConfig(**ODD_SIZES, **EXPERTS, norm_topk_prob=True, head_dim=20),
    "phi3": FAMILIES["phi3-longrope-long"],
    "granite": FAMILIES["granite"],
    "qwen3next": Qwen3NextConfig(**ODD_SIZES | STATE_SIZES, **EXPERTS, shared_expert_intermediate_size=45),
    "qwen35": WITH_STATES["qwen3.5"],
    "qwen35moe": WITH_STATES["qwen3.5-moe"],
    "smollm3": SmolLM3Config(**ODD_SIZES | {"num_hidden_layers": 4}, **PHI3_TOKENS),
    "olmo2": Olmo2Config(**ODD_SIZES, **PHI3_TOKENS),
    "olmo3": FAMILIES["olmo3"],
    "gemma2": Gemma2Config(
        **ODD_SIZES,
        tie_word_embeddings=False,
        head_dim=20,
        query_pre_attn_scalar=20,
        sliding_window=21,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=7.0,
    ),
    "gemma3": Gemma3TextConfig(
        **ODD_SIZES,
        tie_word_embeddings=False,
        head_dim=20,
        query_pre_attn_scalar=20,
        sliding_window=15,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}

LARGE = LlamaConfig(
    vocab_size=307,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,
)


def generated(path: Path) -> list[int]:
    """What the engine continues the prompt with, in float32."""
    options = EngineConfig(num_gpu_blocks_override=100, max_model_len=150, dtype="float32")
    engine = Engine.from_pretrained(path, options)
    return token_ids(run_all(engine, [Request("r", PROMPT, greedy_params())])["r"])


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_answers_as_transformers(architecture, tmp_path):
    model = save_random_model(CONFIGS[architecture], tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    assert generated(tmp_path / "model.gguf") == greedy(model, PROMPT)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A Llama whose matrices fit all types of blocks."""
    folder = tmp_path_factory.mktemp("large")
    save_random_model(LARGE, folder)
    return folder


def dequantized_model(folder: Path, file: GgufFile) -> Any:
    """transformers' model with the weights that the file has."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = {name: torch.from_numpy(weight) for name, weight in file.dequantized.items()}
    model.load_state_dict(weights, strict=False)
    return model


@pytest.mark.parametrize(
    "kinds",
    [
        ("F16",),
        ("BF16",),
        ("Q4_0", "Q5_0"),
        ("Q4_1", "Q5_1"),
        ("Q8_0", "Q6_K"),
        ("Q4_K", "Q5_K"),
        ("Q2_K", "Q3_K"),
        ("IQ4_XS", "IQ4_NL"),
        ("IQ1_S", "IQ2_XXS"),
        ("IQ1_M", "IQ2_XS"),
        ("IQ3_XXS", "IQ2_S"),
        ("IQ3_S", "MXFP4"),
        ("TQ1_0", "TQ2_0"),
    ],
)
def test_every_type_answers_as_its_dequantized_weights(kinds, large, tmp_path):
    file = write_gguf(large, tmp_path / "model.gguf", kinds[0], kinds={"down_proj": kinds[-1], "embed": kinds[-1]})
    assert generated(file.path) == greedy(dequantized_model(large, file), PROMPT)


@pytest.fixture(scope="module")
def with_states(tmp_path_factory) -> Path:
    """A Qwen3.5 whose matrices fit all types of blocks, with two value heads of half a block of 256 to a key head."""
    folder = tmp_path_factory.mktemp("with_states")
    states = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 128}
    sizes = {name: value for name, value in LARGE.to_dict().items() if name in ODD_SIZES}
    save_random_model(Qwen3_5TextConfig(**sizes | states | heads, tie_word_embeddings=False), folder)
    return folder


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_value_heads_are_put_in_order_within_blocks(kind, with_states, tmp_path):
    """Where a block has inputs of two heads, it is not kept as a block."""
    file = write_gguf(with_states, tmp_path / "model.gguf", "Q4_0", kinds={"out_proj": kind})
    assert generated(file.path) == greedy(dequantized_model(with_states, file), PROMPT)
    kept = {
        name
        for names in read_cpu_quantization(file.path)["quantization_config"]["modules"].values()
        for name in names
        if name.startswith("model.layers.0.linear_attn.")
    }
    inputs = {f"model.layers.0.linear_attn.in_proj_{name}" for name in ("qkv", "z", "a", "b")}
    assert kept - inputs == (set() if kind == "Q4_K" else {"model.layers.0.linear_attn.out_proj"})
    assert kept >= inputs


def test_layers_that_guess_ahead_are_left_out(tmp_path):
    model = save_random_model(CONFIGS["qwen35"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))

    def add_guessing(writer: gguf.GGUFWriter) -> None:
        for name in ("attn_q.weight", "nextn.eh_proj.weight", "nextn.enorm.weight"):
            writer.add_tensor(f"blk.4.{name}", np.zeros((8, 8), np.float32))

    write_gguf(tmp_path, tmp_path / "model.gguf", extra=[add_guessing])
    assert generated(tmp_path / "model.gguf") == greedy(model, PROMPT)


@pytest.mark.parametrize(
    ("num_heads", "size", "message"),
    [
        (4, 192, r"tensor blk\.0\.attn_qkv\.weight has the shape .*, and not as the metadata say"),
        (10, 90, r"tensor model\.layers\.0\.linear_attn\.in_proj_b\.weight in .* has shape"),
    ],
)
def test_tensors_that_are_not_as_the_metadata_say_are_named(num_heads, size, message, tmp_path):
    save_random_model(CONFIGS["qwen35"], tmp_path)

    def add_others(writer: gguf.GGUFWriter) -> None:
        writer.add_ssm_time_step_rank(num_heads)
        writer.add_ssm_inner_size(size)

    write_gguf(tmp_path, tmp_path / "model.gguf", extra=[add_others])
    with pytest.raises(ModelError, match=message):
        generated(tmp_path / "model.gguf")


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_all_bytes_are_read_as_llama_cpp_reads_them(number):
    kind = BLOCK_TYPES[number]
    size = kind.num_bytes * 64 // min(kind.num_weights, 64)
    raw = np.random.default_rng(number).integers(0, 256, (500, size), dtype=np.uint8)
    ours = dequantized(torch.from_numpy(raw), kind, torch.float32).numpy()
    # Scales are any bits too.
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bits_stay_four_bits_where_kernels_take_them(kind, large, tmp_path):
    file = write_gguf(large, tmp_path / "model.gguf", kind, kinds={"layers.1.self_attn.v_proj": "Q8_0"})
    config = ModelConfig.from_pretrained(file.path)
    kept = Decoder(config, 64, LlamaLayer, torch.float32, CPU)
    kept.load()
    num_bytes = sum(map(bytes_of, kept.parts.values())) + 4 * config.vocab_size * config.hidden_size
    assert weight_bytes(config, 4) == pytest.approx(num_bytes, rel=0.02)
    for name, part in kept.parts.items():
        held = part.linear.held
        # What is multiplied as one is kept as one.
        is_kept = "layers.1.self_attn" not in name or "o_proj" in name
        assert isinstance(held, Tensor) != is_kept, name
        if is_kept:
            weight = held.read()
            assert isinstance(weight, Int4Weight)
            rows = weight.dequantized(torch.float32)[part.start : part.start + part.size]
            expected = torch.from_numpy(file.dequantized[f"{name}.weight"])
            # The scales and minima of Q4_K are rounded, to eleven bits, and may be thrice as large as what is between.
            tolerance = 3 * 2.0**-11 * float(expected.abs().max()) if kind == "Q4_K" else 0.0
            torch.testing.assert_close(rows, expected, rtol=0, atol=tolerance)


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_0", 4.5), ("Q4_1", 5), ("Q4_K", 5), ("Q5_0", 8.5), ("Q8_0", 8.5), ("Q6_K", 10)]
)
def test_a_cpu_multiplies_blocks_as_they_are(kind, bits, large, tmp_path):
    file = write_gguf(large, tmp_path / "model.gguf", kind, kinds={"layers.1.self_attn.v_proj": "F16"})
    model = load_model(ModelConfig.from_pretrained(file.path), EngineConfig(), torch.float32, CPU)
    model.prepack()
    for name, part in model.parts.items():
        product = part.linear._product
        is_kept = "layers.1.self_attn" not in name or "o_proj" in name
        assert isinstance(product, GroupedProduct) == is_kept, name
        if isinstance(product, GroupedProduct):
            num_bytes = sum(each.nbytes for each in (product._weight, *product._factors))
            padded = part.linear.num_outputs + -part.linear.num_outputs % (32 if has_avx512() else 16)
            assert num_bytes * 8 == bits * padded * part.linear.num_inputs, name
        x = torch.randn(3, part.linear.num_inputs)
        weight = torch.from_numpy(file.dequantized[f"{name}.weight"])
        found = part.linear(x)[:, part.start : part.start + part.size]
        # The scales of Q4_K are rounded, to eleven bits.
        tolerance = 2.0**-11 * float((x.abs() @ weight.abs().t()).max()) if kind == "Q4_K" else 2e-5
        torch.testing.assert_close(found, x @ weight.t(), rtol=0, atol=tolerance)


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
def test_an_embedding_that_is_the_head_is_multiplied_as_it_is(tmp_path):
    trained = save_random_model(LlamaConfig(**LARGE.to_dict() | {"tie_word_embeddings": True}), tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    model = load_model(ModelConfig.from_pretrained(file.path), EngineConfig(), torch.float32, CPU)
    model.prepack()
    assert isinstance(model._head.matrix._product, GroupedProduct)
    weights = {name: torch.from_numpy(weight) for name, weight in file.dequantized.items()}
    trained.load_state_dict(weights, strict=False)
    assert generated(file.path) == greedy(trained, PROMPT)


@pytest.mark.skipif(not supports_int8(torch.float32, CPU), reason="needs the compiled kernels")
def test_blocks_become_int8_where_that_is_asked_for(large, tmp_path):
    file = write_gguf(large, tmp_path / "model.gguf", "Q8_0")
    options = EngineConfig(quantization="int8")
    model = load_model(ModelConfig.from_pretrained(file.path), options, torch.float32, CPU)
    model.prepack(options.quantization)
    products = {name: part.linear._product for name, part in model.parts.items() if name != "lm_head"}
    assert {name for name, product in products.items() if not isinstance(product, Int8Product)} == set()


def bytes_of(part: LinearPart) -> int:
    """Of its share of what is multiplied as one."""
    held = part.linear.held
    if isinstance(held, Tensor):
        return part.size * held.shape[1] * held.element_size()
    weight = held.read()
    kept = (weight.packed, weight.scales, weight.zeros)
    return sum(each.nbytes for each in kept) * part.size // part.linear.num_outputs


def held_weight(held: Tensor | StoredWeight) -> Tensor:
    return held if isinstance(held, Tensor) else held.read().dequantized(torch.float32)


def load_shares(file: GgufFile, size: int) -> list[Decoder]:
    """Each rank's model, in the layouts that a GPU takes."""
    ranks = [ProcessRanks(rank, size, CPU, "", lambda: None) for rank in range(size)]
    config = ModelConfig.from_pretrained(file.path)
    shares = [Decoder(config, 64, LlamaLayer, torch.float32, CPU, each) for each in ranks]
    for share in shares:
        share.load()
    return shares


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_ranks_share_matrices(kind, large, tmp_path):
    file = write_gguf(large, tmp_path / "model.gguf", kind)
    shares = [share.parts for share in load_shares(file, 2)]
    for name, axis in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
        parts = [share[f"model.layers.1.{name}"] for share in shares]
        rows = [held_weight(part.linear.held)[part.start :][: part.size] for part in parts]
        expected = torch.from_numpy(file.dequantized[f"model.layers.1.{name}.weight"])
        assert torch.equal(torch.cat(rows, axis), expected), name


def test_ranks_do_not_share_a_block(large, tmp_path):
    file = write_gguf(large, tmp_path / "model.gguf", "Q4_K")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 would split groups of 256 inputs of .*o_proj"):
        load_shares(file, 2)


def test_a_model_in_parts_is_one(large, tmp_path):
    whole = write_gguf(large, tmp_path / "whole.gguf", "Q8_0")
    write_gguf(large, tmp_path / "part.gguf", "Q8_0", num_parts=2)
    parts = sorted(tmp_path.glob("part-*"))
    assert [part.name for part in parts] == ["part-00001-of-00002.gguf", "part-00002-of-00002.gguf"]
    assert generated(parts[0]) == generated(whole.path)
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"has no part-00002-of-00002\.gguf: the model is split into 2 files"):
        ModelConfig.from_pretrained(parts[0])


def test_a_files_own_alignment(large, tmp_path):
    file = write_gguf(large, tmp_path / "model.gguf", "F16", extra=[lambda it: it.add_custom_alignment(4096)])
    tensors = GgufTensors(file.path)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        expected = torch.from_numpy(file.dequantized[name])
        assert torch.equal(tensors.read(name, torch.float32), expected), name


@pytest.mark.parametrize(
    ("architecture", "layers", "sizes", "scalar"),
    [
        ("gemma2", 42, (3584, 16, 256), 256),
        ("gemma2", 46, (4608, 32, 128), 144),
        ("gemma3", 48, (3840, 16, 256), 256),
        ("gemma3", 62, (5376, 32, 128), 168),
    ],
)
def test_scores_of_the_largest_gemmas_are_divided_as_published(architecture, layers, sizes, scalar, tmp_path):
    """By the root of the width over the heads, which no field of a file says."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    size, num_heads, head_dim = sizes
    writer.add_embedding_length(size)
    writer.add_head_count(num_heads)
    writer.add_key_length(head_dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(8)
    writer.add_context_length(8192)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_config(tmp_path / "model.gguf")["query_pre_attn_scalar"] == scalar


def test_weights_are_kept_in_the_type_they_are_in(large, tmp_path):
    for kind, dtype in {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q4_K": "bfloat16"}.items():
        file = write_gguf(large, tmp_path / f"{kind}.gguf", kind)
        assert ModelConfig.from_pretrained(file.path).checkpoint_dtype == dtype


def broken(folder: Path, change: Callable[[bytearray], Any]) -> Path:
    """The model's file with some of its bytes changed."""
    content = bytearray(write_gguf(folder, folder / "broken.gguf", "Q4_0").path.read_bytes())
    change(content)
    (folder / "broken.gguf").write_bytes(content)
    return folder / "broken.gguf"


def replaced(before: bytes, after: bytes) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        assert before in content
        content[:] = content.replace(before, after)

    return change


BROKEN: dict[str, tuple[Callable[[bytearray], Any], str]] = {
    "no GGUF": (replaced(b"GGUF", b"PK\3\4"), r"broken\.gguf is not a GGUF file: it begins with b'PK"),
    "old version": (lambda content: content.__setitem__(4, 1), "has version 1 of the GGUF format; supported: 2, 3"),
    "big-endian": (lambda content: content.__setitem__(slice(4, 8), b"\0\0\0\3"), "has version 50331648 of"),
    "half a header": (lambda content: content.__delitem__(slice(100, None)), "damaged or truncated: its header"),
    "empty": (lambda content: content.clear(), "is not a GGUF file: it begins with b''"),
    "half the weights": (lambda content: content.__delitem__(slice(-20000, None)), r"is truncated: it ends within"),
    "architecture": (
        replaced(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba"),
        "unsupported general.architecture 'mamba'; supported: llama",
    ),
    "missing field": (replaced(b"llama.block_count", b"llama.block_kount"), "has no field 'llama.block_count' in its"),
    "type": (
        replaced(
            b"blk.0.attn_v.weight" + struct.pack("<IQQI", 2, 256, 128, 2),
            b"blk.0.attn_v.weight" + struct.pack("<IQQI", 2, 256, 128, 40),
        ),
        "tensor blk.0.attn_v.weight has the type NVFP4; supported: F32, F16",
    ),
    "tensor": (
        replaced(b"blk.1.ffn_up.weight", b"blk.1.ffn_ap.weight"),
        "lacks the tensor model.layers.1.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_by_name(name, large):
    change, message = BROKEN[name]
    file = broken(large, change)
    with pytest.raises(ModelError, match=message):
        load_model(ModelConfig.from_pretrained(file), EngineConfig(), torch.float32, CPU)

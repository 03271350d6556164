"""Compiles what the Triton wrappers would launch on a GPU, on a machine without one; prints a JSON line a kernel.

    compile_kernels.py attention linear rest           # for an H200
    compile_kernels.py --cards A100,L4,RTX5090 heads   # every size of head in every dtype and cache: takes minutes
    compile_kernels.py --report models                 # what the machine's code has, at the shapes of published models

Started by `test_triton_compiles.py` in processes of their own, since there Triton must not be interpreting. The
interpreter is lenient with types, and knows nothing of shared memory.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import torch
from compiled_before import CompiledBefore, Facts, Record, compile_unknown
from machine_code import describe, read_unwritten
from ptx_checks import cuts_float32, fuses_rounding, waits_at_end, waits_first
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from headrace.kernels import device, triton_assembler
from headrace.kernels.activation import triton as activation
from headrace.kernels.causal_conv import triton as causal_conv
from headrace.kernels.gated_delta import triton as gated_delta
from headrace.kernels.kv_cache import triton as kv_cache
from headrace.kernels.layer_norm import triton as layer_norm
from headrace.kernels.linear import Fp4Weight, Int4Weight, RowFormat, ScaledWeight
from headrace.kernels.linear import triton as linear
from headrace.kernels.linear.gates import Gate
from headrace.kernels.lora import AdapterMatrices, TokenTiles
from headrace.kernels.lora import triton as lora
from headrace.kernels.mamba2 import triton as mamba2
from headrace.kernels.moe import ExpertGroups, StackedExperts
from headrace.kernels.moe import triton as moe
from headrace.kernels.moe.stacked_experts import (
    ByteMatrices,
    ClampedGate,
    Fp4Matrices,
    Int4Matrices,
    Matrices,
    PlainMatrices,
)
from headrace.kernels.norm_rotary import triton as norm_rotary
from headrace.kernels.paged_attention import AttentionMetadata, hopper
from headrace.kernels.paged_attention import triton as attention
from headrace.kernels.recurrent_states import StateSlots
from headrace.kernels.sampling import triton as sampling
from headrace.kernels.triton_early_launch import early_launch


@dataclass(frozen=True)
class Card:
    """shared_bytes: what a program may have."""

    name: str
    capability: int
    shared_bytes: int
    processors: int

    @property
    def has_fp8(self) -> bool:
        """Whether it knows E4M3."""
        return self.capability >= 89

    @property
    def fp8(self) -> torch.dtype:
        """What a cache in 8 bits is there."""
        return FP8 if self.has_fp8 else torch.float8_e5m2


BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8, INT8 = torch.float8_e4m3fn, torch.int8
TYPE_NAMES = {
    BF16: "bf16",
    F16: "fp16",
    F32: "fp32",
    F64: "fp64",
    FP8: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    INT8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
CARDS = {
    name: Card(name, capability, kib * 1024, processors)
    for name, capability, kib, processors in (
        *(("A100", 80, 163, 108), ("A10", 86, 99, 72), ("L4", 89, 99, 58)),
        *(("H200", 90, 227, 132), ("B200", 100, 227, 148), ("RTX5090", 120, 99, 170)),
    )
}


NEWEST_CUDA = 99

# Of an expert's two products one is compiled: they differ in which place of a row is read and which is written.
_OF_PLACES = "IS_FIRST"
# They need a third at most of what the smallest card has.
_OF_LITTLE = {"group_products_kernel", "merge_kernel", "recurrent_rule_kernel", "recurrent_scan_kernel"}
_compiled: set[tuple[object, ...]] = set()
_left_out: set[str] = set()
_told: list["Told"] = []


@dataclass
class Told:
    """What is to be printed of a kernel. key: in the record, where it is new; cubin: its code then, if it has wgmma."""

    about: dict[str, Any]
    facts: Facts
    key: str = ""
    cubin: bytes | None = None


def compile_instead(
    kernel: Any, card: Card, record: Record | None, *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> None:
    """In place of a launch: compile the kernel for these arguments, as a launch would."""
    if kernel.fn.__name__ in _left_out:
        return
    names = [parameter.name for parameter in kernel.params]
    arguments = {**dict(zip(names, args, strict=False)), **{k: v for k, v in kwargs.items() if k in names}}
    options = {name: value for name, value in kwargs.items() if name not in names}
    signature, constants, attributes = specialised(kernel, arguments)
    decisive = [value for (index,), value in constants.items() if kernel.params[index].name != _OF_PLACES]
    alike = (card, kernel.fn.__name__, *signature.values(), *map(str, decisive), *attributes, *options.items())
    if record is not None and alike in _compiled:
        return
    _compiled.add(alike)
    source_kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_kind(kernel, signature, constants, attributes)
    shapes = {name: value for name, value in arguments.items() if name.isupper()}
    types = [signature[parameter.name] for parameter in kernel.params if signature[parameter.name].startswith("*")]
    about = {"card": card.name, "kernel": kernel.fn.__name__, "types": " ".join(dict.fromkeys(types))}
    about |= {"limit": card.shared_bytes, **options, **shapes}
    target = GPUTarget("cuda", card.capability, 32)
    try:
        key, compiled = compile_unknown(source, target, options, card.name, record or Record({}))
    except CompiledBefore as before:
        _told.append(Told(about, before.facts))
        return
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    facts = {"shared_bytes": compiled.metadata.shared, "fuses": fuses_rounding(ptx)}
    if arguments.get("PRECISION") == "ieee":
        facts["cuts"] = cuts_float32(ptx)
    if options.get("launch_pdl"):
        facts["waits"] = (waits_at_end if arguments.get("FOLLOWS_WIDE", False) else waits_first)(ptx)
    if record is None:
        about |= describe(cubin, card.capability, compiled.metadata.num_warps, compiled.metadata.shared)
    _told.append(Told(about, facts, key, cubin if "wgmma" in ptx else None))


def specialised(
    kernel: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]:
    """What a launch compiles a kernel for: its parameters' types, which are constants, and what is known of others."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        # Triton compiles for a number that is one or a multiple of 16, unless it is told not to.
        is_special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and value == 1):
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, torch.Tensor) or (is_special and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def tell(card: Card) -> dict[str, Facts]:
    """Print what was compiled, and what of it reads registers that nothing has written. Returns the record's facts."""
    suspects = [told for told in _told if told.cubin is not None]
    found = read_unwritten([told.cubin for told in suspects], card.capability) if suspects else []
    for told, unwritten in zip(suspects, found, strict=True):
        told.facts = {**told.facts, "unwritten": unwritten}
    for told in _told:
        print(json.dumps({**told.about, "unwritten": [], **told.facts, "is_new": bool(told.key)}), flush=True)
    facts = {told.key: told.facts for told in _told if told.key}
    _told.clear()
    return facts


def attend(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
    query_lens: Sequence[int] = (1, 1, 300),
    has_sinks: bool = False,
    value_dim: int | None = None,
) -> None:
    """By default a batch that has narrow items, wide ones and merges."""
    tables = [list(range(first, first + count)) for first, count in ((0, 63), (63, 2), (65, 19))]
    contexts = [1000, 20, 300]
    metadata = AttentionMetadata(list(query_lens), contexts[-len(query_lens) :], tables[-len(query_lens) :], 16)
    query = torch.zeros(sum(query_lens), heads, head_dim, dtype=dtype)
    keys, values = torch.zeros(2, 84, 16, kv_heads, head_dim).to(kv_dtype or dtype)
    if value_dim is not None:
        values = keys[..., :value_dim]
    sinks = torch.zeros(heads) if has_sinks else None
    given = query, keys, values, metadata, 0.1, sliding_window, soft_cap
    attention.paged_attention_triton(*given, sinks=sinks)


def compile_attention(card: Card) -> None:
    """Each dtype, each kind of cache, each size of tile, with a window and a cap and without: not all with all."""
    attend(32, 8, 128, BF16)
    attend(8, 4, 256, BF16)
    # gpt-oss.
    attend(64, 8, 64, BF16, 128, has_sinks=True)
    attend(8, 1, 80, F16, 100, 30.0)
    # Takes the most memory of all; without tensor cores it takes its time, and the narrow shape is within the wide.
    attend(6, 2, 256, F32, query_lens=[300])
    attend(32, 8, 128, BF16, kv_dtype=card.fp8)
    attend(14, 2, 64, BF16, 100, 30.0, kv_dtype=torch.float8_e5m2)
    attend(6, 2, 64, F32, kv_dtype=card.fp8)
    compile_large_heads(card)
    compile_latents(card)


def compile_large_heads(card: Card) -> None:
    """Gemma 4's, of the layers without a window."""
    attend(32, 4, 512, BF16)
    attend(8, 1, 512, BF16, kv_dtype=card.fp8)
    attend(8, 1, 512, F32, query_lens=[300])


def compile_latents(card: Card) -> None:
    """GLM-4.7-Flash's, DeepSeek-V3's and DeepSeek-V2-Lite's."""
    attend(20, 1, 576, BF16, value_dim=512)
    attend(128, 1, 576, BF16, value_dim=512)
    attend(20, 1, 576, BF16, value_dim=512, kv_dtype=card.fp8)
    attend(16, 1, 576, F32, value_dim=512, query_lens=[300])


def compile_tightest(card: Card) -> None:
    """What needs the most shared memory where there is less than on Hopper; on an L4 what is launched besides, too."""
    if card.name != "L4":
        _left_out.update(_OF_LITTLE)
    attend(8, 4, 256, BF16)
    attend(32, 4, 512, BF16)
    attend(20, 1, 576, BF16, value_dim=512)
    go_by_the_rule(256, BF16)
    scan(64, 1, 128, 64, BF16)
    scan(32, 2, 256, 64, BF16)
    _left_out.clear()


def compile_heads(card: Card) -> None:
    for head_dim in (64, 80, 96, 128, 256):
        for dtype, kv_dtype in ((BF16, None), (F16, None), (BF16, card.fp8), (F32, None), (F32, card.fp8)):
            attend(8, 2, head_dim, dtype, kv_dtype=kv_dtype)


def compile_linear(card: Card) -> None:
    """One row, some and many; with a split and without, grouped and not. Bytes do not depend on the dtype."""
    for rows, dtype in ((1, BF16), (48, F16), (300, BF16), (300, F32)):
        x, grouped = torch.zeros(rows, 4096, dtype=dtype), torch.ones(32, 6144)
        int4 = Int4Weight(
            torch.zeros(2048, 6144, dtype=torch.uint8), grouped.half(), grouped.to(torch.uint8), 128, 4096
        )
        linear.int4_linear_triton(x, int4, grouped[0].to(dtype), 1 if rows > 1 else 4)
        linear.unpack_int4_triton(int4, range(6144), dtype)
        if rows == 1:
            nvfp4 = Fp4Weight(int4.packed, torch.zeros(256, 6144, dtype=torch.uint8), 4096, torch.ones(6144))
            linear.int4_linear_triton(x, nvfp4)
            linear.unpack_int4_triton(nvfp4, range(6144), dtype)
        if dtype == F16:
            # GGUF's blocks: groups of 32, minima for zeros.
            minima = torch.zeros(128, 6144, dtype=F16)
            of_minima = replace(int4, scales=minima, zeros=minima, group_size=32)
            linear.int4_linear_triton(x, of_minima)
            linear.unpack_int4_triton(of_minima, range(6144), dtype)
        for byte_dtype in ((INT8, FP8) if card.has_fp8 else (INT8,)) if dtype == BF16 else ():
            values = torch.zeros(6144, 4096, dtype=byte_dtype)
            for scales, group_size in ((grouped[:1], 4096), (grouped, 128)):
                quantized = linear.quantize_rows_triton(x, byte_dtype, group_size)
                linear.quantize_gated_triton(torch.cat((x, x), 1), byte_dtype, group_size, Gate.SILU)
                for has_blocks in {False, group_size == 128}:
                    weight = ScaledWeight(values, scales, group_size, has_blocks)
                    linear.scaled_linear_triton(*quantized, weight, None, dtype)


def compile_wide_from_narrow(card: Card) -> None:
    """float32 times what is unpacked from four bits."""
    x, scales = torch.zeros(256, 4096), torch.ones(32, 6144)
    for rows in (1, 256):
        int4 = Int4Weight(torch.zeros(2048, 6144, dtype=torch.uint8), scales, scales.to(torch.uint8), 128, 4096)
        linear.int4_linear_triton(x[:rows], int4)
    experts = StackedExperts(matrices("int4", F32, 2 * 768, 2048), matrices("int4", F32, 2048, 768), Gate.SILU)
    ids, shares = torch.zeros(256, 8, dtype=torch.int64), torch.ones(256, 8)
    moe.mix_stacked_experts_triton(x[:, :2048], experts, ids, shares)


def compile_the_rest(card: Card) -> None:
    for dtype in (BF16, F32):
        x = torch.zeros(4, 4096, dtype=dtype)
        norm_rotary.add_rms_norm_triton(x, x.clone(), x[0], 1e-5)
        norm_rotary.rms_norm_triton(x, x[0].float(), 1e-5)
        for byte_dtype in (FP8, INT8) if card.has_fp8 else (INT8,):
            for group_size in (4096, 128):
                row_format = RowFormat(byte_dtype, group_size)
                norm_rotary.add_rms_norm_quantized_triton(x, x.clone(), x[0], 1e-5, row_format)
        layer_norm.add_layer_norm_triton(x, x.clone(), x[0], x[0], 1e-5)
        layer_norm.layer_norm_triton(x, x[0], x[0], 1e-5)
        activation.silu_and_mul_triton(x)
        activation.gelu_tanh_and_mul_triton(x)
        for half, norm in ((64, None), (24, torch.zeros(128, dtype=dtype))):
            angles, cache = torch.zeros(4, half, dtype=dtype), torch.zeros(9, 16, 8, 128, dtype=dtype)
            qkv = torch.zeros(4, 48 * 128, dtype=dtype)
            norm_rotary.rotate_and_write_triton(qkv, angles, angles, cache, cache, torch.arange(4), norm, norm, 1e-5)
            for fp8 in {card.fp8, torch.float8_e5m2} if dtype == BF16 else (card.fp8,):
                caches = cache.to(fp8), cache.to(fp8)
                norm_rotary.rotate_and_write_triton(qkv, angles, angles, *caches, torch.arange(4), norm, norm, 1e-5)
        for latent_dtype in (dtype, card.fp8):
            heads, row = torch.zeros(4, 20, 576, dtype=dtype), torch.zeros(9, 16, 1, 576).to(latent_dtype)
            angles, rest = torch.zeros(4, 32, dtype=dtype), heads[..., 512:]
            given = (rest, heads[:, 0], x[0, :512], 1e-6, angles, angles, heads, row, torch.arange(4))
            norm_rotary.rotate_and_write_latents_triton(*given)
        logits, doubles, counts = torch.zeros(4, 128256, dtype=dtype), torch.ones(4, dtype=F64), torch.arange(4)
        sampling.sample_tokens_triton(logits, doubles, counts, doubles, doubles, doubles)
        sampling.likeliest_tokens_triton(logits, True)
        sampling.apply_bit_mask_triton(logits, torch.zeros(4, 4008, dtype=torch.int32))
    sampling.philox_uniform_triton(counts, counts)
    sampling.penalize_triton(logits, counts, counts, counts, *torch.ones(3, 4))
    kv_cache.copy_blocks_triton(torch.zeros(2, 3, 9, 16, 8, 128, dtype=BF16), counts, counts + 4)


def compile_lora(card: Card) -> None:
    """Steps of few tokens and of many, of a rank that a product takes at once and of one that it does not."""
    for num_tokens, max_rank, dtype in ((40, 16, BF16), (300, 128, F16)):
        parts = ((0, 4096), (4096, 1024), (5120, 1024))
        matrices = AdapterMatrices.blank(3, max_rank, 4096, 6144, parts, dtype, torch.device("cpu"))
        tiles = TokenTiles.blank(num_tokens, 3, torch.device("cpu"))
        x, output = torch.zeros(num_tokens, 4096, dtype=dtype), torch.zeros(num_tokens, 6144, dtype=dtype)
        lora.add_low_rank_triton(output, x, matrices, tiles)


def compile_moe(card: Card) -> None:
    """Decodes and prefills in sizes of whole tiles (Qwen3-30B-A3B's and gpt-oss'), and in others."""
    for kind, dtype, size, inner, all_tokens in (
        ("plain", BF16, 2048, 768, (1, 1024, 8192)),
        *((kind, BF16, 2048, 768, (1, 8192)) for kind in ("int4", FP8)),
        *((kind, BF16, 2880, 2880, (8, 4096)) for kind in ("biased", "fp4")),
        ("nvfp4", BF16, 2048, 768, (1,)),
        (INT8, BF16, 2048, 768, (1,)),
        ("plain", F16, 200, 100, (40,)),
        ("plain", F32, 64, 72, (9,)),
    ):
        gate_up, down = matrices(kind, dtype, 2 * inner, size), matrices(kind, dtype, size, inner)
        experts = StackedExperts(gate_up, down, Gate.SILU)
        if kind in ("biased", "fp4"):
            biases = torch.empty(128, 2 * inner, dtype=dtype), torch.empty(128, size, dtype=dtype)
            experts = StackedExperts(gate_up, down, ClampedGate(7.0, 1.702), biases)
        if kind == FP8 and not card.has_fp8:
            continue
        for num_tokens in all_tokens:
            ids, shares = moe.choose_experts_triton(torch.empty(num_tokens, 128, dtype=dtype), 8, True)
            moe.mix_stacked_experts_triton(torch.empty(num_tokens, size, dtype=dtype), experts, ids, shares)
    # GLM-4.5's, ERNIE 4.5's, DeepSeek-V3's.
    for num_experts, num_chosen, are_sigmoids, groups in (
        (160, 8, True, ExpertGroups()),
        (64, 6, False, ExpertGroups()),
        (256, 8, True, ExpertGroups(8, 4)),
    ):
        correction = torch.empty(num_experts)
        moe.choose_experts_triton(torch.empty(9, num_experts), num_chosen, True, correction, 1.0, are_sigmoids, groups)
    # DeepSeek-V2's.
    moe.choose_experts_triton(torch.empty(9, 160), 6, False, None, 16.0, groups=ExpertGroups(8, 3))


def matrices(kind: str | torch.dtype, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> Matrices:
    """Of 128 experts. FP8 has groups of 128 inputs, int8 has none."""
    groups = torch.empty(128, -(-num_inputs // 128), num_outputs)
    if isinstance(kind, torch.dtype):
        values = torch.empty(128, num_outputs, num_inputs, dtype=kind)
        return ByteMatrices(values, *((groups, 128, True) if kind == FP8 else (groups[:, :1].contiguous(), num_inputs)))
    packed = torch.empty(128, -(-num_inputs // 64) * 32, num_outputs, dtype=torch.uint8)
    if kind == "nvfp4":
        scales = torch.empty(128, num_inputs // 16, num_outputs, dtype=torch.uint8)
        return Fp4Matrices(packed, scales, num_inputs, torch.empty(128, num_outputs))
    if kind == "fp4":
        return Fp4Matrices(packed, torch.empty(128, -(-num_inputs // 32), num_outputs, dtype=dtype), num_inputs)
    if kind == "int4":
        return Int4Matrices(packed, groups.half(), groups.to(torch.uint8), 128, num_inputs)
    return PlainMatrices(torch.empty(128, num_outputs, num_inputs, dtype=dtype))


def compile_gated_delta(card: Card) -> None:
    """Decodes, and a prefill among them, in the sizes of Qwen3-Next-80B-A3B."""
    for dtype in (BF16, F32):
        go_by_the_rule(128, dtype)
        for query_lens in ((1, 1), (1, 100)):
            x, weight = torch.zeros(sum(query_lens), 8192, dtype=dtype), torch.zeros(8192, 4, dtype=dtype)
            causal_conv.causal_conv_triton(x, weight, torch.zeros(3, 3, 8192, dtype=dtype), slots_of(query_lens))
        heads, gate = torch.zeros(4, 32, 128, dtype=dtype), torch.zeros(4, 32 * 128, dtype=dtype)
        gated_delta.gated_rms_norm_triton(heads, gate, heads[0, 0], 1e-6)
    go_by_the_rule(24, F16)
    # A head alone, in rows of an odd length: of it CUDA 12.8's assembler made what computed with unwritten registers.
    mixed, of_head, states = (
        torch.zeros(21, 83, dtype=BF16)[:, :-3],
        torch.zeros(21, 1, dtype=BF16),
        torch.zeros(3, 1, 32, 16),
    )
    factor = torch.zeros(1)
    gated_delta.gated_delta_rule_triton(mixed, of_head, of_head, factor, factor, states, slots_of((1, 20)))


def go_by_the_rule(head_dim: int, dtype: torch.dtype) -> None:
    """A decode and a prefill, with twice as many heads as keys."""
    slots, states, of_head = slots_of((1, 100)), torch.zeros(3, 32, head_dim, head_dim), torch.zeros(32)
    mixed, of_heads = torch.zeros(101, 64 * head_dim, dtype=dtype), torch.zeros(101, 32, dtype=dtype)
    gated_delta.gated_delta_rule_triton(mixed, of_heads, of_heads, of_head, of_head, states, slots)


def compile_mamba2(card: Card) -> None:
    """Decodes, and a prefill among them, in the sizes of Granite 4 H and of Nemotron 3."""
    for dtype, groups in ((BF16, 1), (BF16, 8), (F32, 1)):
        scan(64, groups, 128, 64, dtype)
        rows = torch.zeros(4, 4096, dtype=dtype)
        mamba2.grouped_gated_rms_norm_triton(rows, rows, rows[0], 1e-6, groups)
    scan(4, 2, 24, 40, F16)
    # LFM2's and Mamba-2's convolutions.
    for has_bias in (False, True):
        x, weight = torch.zeros(101, 8192, dtype=BF16), torch.zeros(8192, 3, dtype=BF16)
        bias = weight[:, 0].contiguous() if has_bias else None
        slots, states = slots_of((1, 100)), torch.zeros(3, 2, 8192, dtype=BF16)
        causal_conv.causal_conv_triton(x, weight, states, slots, bias=bias, silu=has_bias)


def scan(heads: int, groups: int, state_dim: int, head_dim: int, dtype: torch.dtype) -> None:
    """A decode and a prefill."""
    mixed = torch.zeros(101, heads * head_dim + 2 * groups * state_dim, dtype=dtype)
    dt, of_head, states = torch.zeros(101, heads, dtype=dtype), torch.zeros(heads), (3, heads, state_dim, head_dim)
    given = mixed, dt, of_head, of_head, of_head, torch.zeros(states)
    mamba2.selective_scan_triton(*given, slots_of((1, 100)))


def slots_of(query_lens: Sequence[int]) -> StateSlots:
    return StateSlots(query_lens, (0, 1), (1, 2), torch.device("cpu"))


@dataclass(frozen=True)
class Model:
    """What kernels are compiled for of a published model."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int


MODELS = {
    "Llama-3-8B": Model(32, 8, 128, 4096, 14336, 128256),
    "Qwen2.5-7B": Model(28, 4, 128, 3584, 18944, 152064),
    "Qwen2.5-0.5B": Model(14, 2, 64, 896, 4864, 151936),
    "SmolLM2-135M": Model(9, 3, 64, 576, 1536, 49152),
}


def compile_models(card: Card) -> None:
    """Every kernel as those models launch it in bfloat16: their attention, products, norms, rotary and sampling."""
    for name, model in MODELS.items():
        _told.append(Told({"model": name}, {}))
        for kv_dtype in (None, card.fp8):
            attend(model.heads, model.kv_heads, model.head_dim, BF16, kv_dtype=kv_dtype)
        compile_rows(model)
    # Inputs that are whole tiles, and such that are not.
    compile_products(4096, 14336)
    compile_products(3072, 576)
    compile_lora(card)
    compile_moe(card)
    compile_gated_delta(card)
    compile_mamba2(card)


def compile_rows(model: Model) -> None:
    """What is done to the rows of a step, or to its logits."""
    x, qkv_heads = torch.zeros(256, model.hidden, dtype=BF16), model.heads + 2 * model.kv_heads
    norm_rotary.add_rms_norm_triton(x, x.clone(), x[0], 1e-5)
    norm_rotary.rms_norm_triton(x, x[0], 1e-5)
    activation.silu_and_mul_triton(torch.zeros(256, 2 * model.inner, dtype=BF16))
    angles = torch.zeros(256, model.head_dim // 2, dtype=BF16)
    cache = torch.zeros(2, 2, 9, 16, model.kv_heads, model.head_dim, dtype=BF16)
    qkv, slots = torch.zeros(256, qkv_heads * model.head_dim, dtype=BF16), torch.arange(256)
    norm_rotary.rotate_and_write_triton(qkv, angles, angles, cache[0, 0], cache[1, 0], slots)
    kv_cache.copy_blocks_triton(cache, slots[:4], slots[:4])
    logits, doubles = torch.zeros(4, model.vocab, dtype=BF16), torch.ones(4, dtype=F64)
    sampling.sample_tokens_triton(logits, doubles, slots[:4], doubles, doubles, doubles)
    for with_log_sum_exp in (False, True):
        sampling.likeliest_tokens_triton(logits, with_log_sum_exp)
    sampling.apply_bit_mask_triton(logits, torch.zeros(4, -(-model.vocab // 32), dtype=torch.int32))


def compile_products(outputs: int, inputs: int) -> None:
    """A decode of few rows, one of many, and a prefill."""
    for rows in (16, 256, 4096):
        x = torch.zeros(rows, inputs, dtype=BF16)
        scales, packed = torch.ones(-(-inputs // 128), outputs), torch.zeros(-(-inputs // 64) * 32, outputs)
        int4 = Int4Weight(packed.to(torch.uint8), scales.half(), scales.to(torch.uint8), 128, inputs)
        linear.int4_linear_triton(x, int4)
        linear.unpack_int4_triton(int4, range(outputs), BF16)
        for byte_dtype, group_size in ((INT8, inputs), (FP8, inputs), (FP8, 128)):
            weight = ScaledWeight(
                torch.zeros(outputs, inputs, dtype=byte_dtype), scales if group_size == 128 else scales[:1], group_size
            )
            rows_of_bytes = linear.quantize_rows_triton(x, byte_dtype, group_size)
            linear.scaled_linear_triton(*rows_of_bytes, weight, None, BF16)


PARTS = {
    "models": compile_models,
    "attention": compile_attention,
    "latents": compile_latents,
    "tightest": compile_tightest,
    "heads": compile_heads,
    "linear": compile_linear,
    "wide_from_narrow": compile_wide_from_narrow,
    "gated_delta": compile_gated_delta,
    "lora": compile_lora,
    "large_heads": compile_large_heads,
    "mamba2": compile_mamba2,
    "moe": compile_moe,
    "rest": compile_the_rest,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--cards", default="H200", help="of " + ", ".join(CARDS))
    parser.add_argument("--report", action="store_true", help="registers, stack, programs a processor, instructions")
    parser.add_argument("--record", choices=("read", "write"), help="compile what is not in it; all of these, into it")
    arguments = parser.parse_args()
    record = None if arguments.report else Record.read() if arguments.record == "read" else Record({})
    for module in (
        activation,
        attention,
        causal_conv,
        gated_delta,
        kv_cache,
        layer_norm,
        linear,
        lora,
        mamba2,
        moe,
        norm_rotary,
        sampling,
    ):
        # Tensors on the CPU stand for those on the GPU: only their types and sizes are read.
        vars(module)["check_launch"] = lambda name, tensor, kernel: None
    # As beside the newest driver.
    triton_assembler.use_newer_assembler(NEWEST_CUDA)
    compiled: dict[str, dict[str, Facts]] = {}
    for card in (CARDS[name] for name in arguments.cards.split(",")):
        vars(device)["_INTERPRETED_SHARED_BYTES"] = card.shared_bytes
        vars(device)["_INTERPRETED_PROCESSORS"] = card.processors
        vars(device)["_INTERPRETED_CAPABILITY"] = divmod(card.capability, 10)
        early_launch.cache_clear()
        hopper.hopper_kernel.cache_clear()
        device.shared_bytes.cache_clear()
        device.num_processors.cache_clear()
        JITFunction.run = partialmethod(compile_instead, card, record)
        for part in arguments.parts:
            PARTS[part](card)
        compiled[card.name] = tell(card)
    if arguments.record == "write":
        record = Record.read()
        for name, facts in compiled.items():
            record.replace(name, facts)
        record.write()


if __name__ == "__main__":
    main()

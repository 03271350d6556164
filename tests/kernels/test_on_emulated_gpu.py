"""The Triton kernels as they are compiled for Hopper, emulated: their own tests, a few of each kind, in `ptx/`.

What a compiler may do wrongly, and what Triton's interpreter does not know, is seen here: products that are fused with
sums, addresses that are misaligned, NaN in memory that nobody wrote, pipelines that read too early, warps that touch
the same memory without a barrier between or wait in vain, and bfloat16, which the interpreter computes wrongly. Not
seen are races within a warp (its threads go in lock step), a fence between proxies that is missing, how fast a kernel
is, what NVIDIA's assembler makes of its PTX, and what a GPU does unlike its manual.

All tests of a file, for another GPU too, from the root of the repository:

    export PYTHONPATH=tests/kernels HEADRACE_TESTS_CAPABILITY=80
    python -m pytest -p ptx.plugin tests/kernels/test_triton_moe.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.7", reason="compiles the Triton kernels as 3.7 does")

from .test_triton_compiles import launched_kernels

TESTS = Path(__file__).parent
# Each compiles for some half a minute of a core, which a busy machine may not give it in five.
pytestmark = pytest.mark.timeout(900)
# The fastest that run each kernel in each of its ways; in two processes, for there may be two cores.
CHOSEN = {
    "attention and rows": {
        "test_block_copy.py": [
            "test_copied_blocks_are_equal_and_the_others_untouched[torch.bfloat16-fork-copy_blocks_triton]",
            "test_copied_blocks_are_equal_and_the_others_untouched[torch.float8_e4m3fn-one-copy_blocks_triton]",
        ],
        "test_triton_activation.py": [
            "test_against_the_reference[bfloat16-silu-(13, 101)]",
            "test_every_gate_that_is_near_saturation[bfloat16-gelu]",
        ],
        "test_triton_attention.py": [
            "test_against_the_reference[bfloat16-1of1+1of17+1of200-h4kv2d64-b16]",
            "test_against_the_reference[bfloat16-3of35+64of65-h4kv2d128-b16]",
            "test_against_the_reference[bfloat16-1of200+40of140-h2kv1d64-b128]",
            "test_against_the_reference[bfloat16-9of150-h4kv2d256-b16]",
            "test_against_the_reference[float32-1of1-h4kv2d16-b16]",
            "test_a_window[bfloat16-long-13]",
            "test_a_soft_cap[bfloat16-30.0-13]",
            "test_sinks_beside_shared_prefixes[bfloat16-nested]",
            "test_shared_prefixes[bfloat16-chunks-16-6-2-80]",
            "test_latents[bfloat16-1of1+1of300+3of70+20of40-h20kv1d576v512-b16]",
            "test_shared_prefixes_of_latents[bfloat16-decodes]",
            "test_what_lies_beyond_a_sequences_tokens_does_not_matter",
        ],
        "test_triton_causal_conv.py": [
            "test_convolutions[bfloat16-padded-4-biased]",
            "test_convolutions[bfloat16-decodes-3-plain]",
        ],
        "test_triton_fp8_kv_cache.py": [
            "test_attention[bfloat16-wide-e4m3fn]",
            "test_queries_beyond_float16_see_whom_they_are_like[64]",
            "test_attention[bfloat16-latents-e4m3fn]",
            "test_latents_are_written[bfloat16-e5m2]",
            "test_attention[bfloat16-split-e5m2]",
            "test_rotated_and_written[bfloat16-64-e4m3fn]",
            "test_what_fp8_cannot_reach_is_written_as_its_largest[1000000.0--1000000.0-e5m2]",
            "test_nan_is_written_as_nan",
        ],
        "test_triton_gated_delta.py": [
            "test_the_rule[bfloat16-padded-h2of4-odd]",
            "test_hard_chunks[bfloat16-alike]",
            "test_a_prompt_in_two_parts_is_a_whole_one[bfloat16-70]",
            "test_gated_rms_norm[bfloat16-(5, 3, 24)]",
        ],
        "test_triton_layer_norm.py": [
            "test_layer_norm[bfloat16-(13, 101)]",
            "test_add_layer_norm[bfloat16-(5, 576)]",
        ],
        "test_triton_mamba2.py": [
            "test_the_scan[bfloat16-padded-g2of4-odd]",
            "test_hard_chunks[bfloat16-limited]",
            "test_a_prompt_in_two_parts_is_a_whole_one[bfloat16-70]",
            "test_norm[bfloat16-(5, 3, 24)]",
        ],
        "test_triton_norm_rotary.py": [
            "test_rms_norm[bfloat16-(13, 101)]",
            "test_add_rms_norm[bfloat16-(5, 576)]",
            "test_a_norm_whose_rows_are_quantised[bfloat16-(5, 576)-128-fp8]",
            "test_a_norm_whose_rows_are_quantised[bfloat16-(13, 101)-9999-int8]",
            "test_rotate_and_write[bfloat16-partial-odd-float32]",
            "test_rotate_and_write[bfloat16-decode-same]",
            "test_latents[bfloat16-many-heads]",
        ],
        "test_triton_lora.py": [
            "test_each_token_gets_its_own_adapters[bfloat16-mixed-40]",
            "test_each_token_gets_its_own_adapters[bfloat16-more-than-a-tile-1200]",
        ],
    },
    "products and sampling": {
        "test_triton_linear.py": [
            "test_int4[bfloat16-3-130-200-64-2]",
            "test_int4[bfloat16-64-65-128-128-1]",
            "test_int4[bfloat16-150-130-256-128-2]",
            "test_int4_with_minima[bfloat16-3-200-32-None]",
            "test_int4_of_many_rows[bfloat16-parts-7-600-96-32]",
            "test_int4_with_minima_and_floats_in_four_bits_are_unpacked[bfloat16]",
            "test_nvfp4[bfloat16-3-24-16-None]",
            "test_scaled[bfloat16-3-130-200-200-2-int8]",
            "test_scaled[bfloat16-64-65-128-128-1-fp8]",
            "test_scaled[bfloat16-17-33-300-128-1-int8]",
            "test_scales_of_blocks[bfloat16-3-256-256-2-fp8]",
            "test_rows_in_int8[bfloat16-64-512-128]",
            "test_rows_in_fp8[bfloat16-128]",
            "test_a_product_of_what_is_gated_is_that_of_the_gated_rows[silu_and_mul-300-128-int8]",
        ],
        "test_triton_moe.py": [
            "test_each_token_has_its_own_experts[bfloat16-150-130-some experts without a token]",
            "test_tiles_of_many_rows[bfloat16-some]",
            "test_biases_and_gates_that_are_cut_off[bfloat16-fp4]",
            "test_quantised_experts_give_what_each_gives_alone[bfloat16-fp8-1-3]",
            "test_quantised_experts_give_what_each_gives_alone[bfloat16-int8-blocks-1-3]",
            "test_quantised_experts_give_what_each_gives_alone[bfloat16-int4-1-3]",
            "test_quantised_experts_give_what_each_gives_alone[bfloat16-int8-1-3]",
            "test_the_likeliest_experts_are_chosen[bfloat16-60-4-True]",
            "test_logits_that_are_no_numbers_name_experts_that_there_are[groups0]",
            "test_experts_of_the_best_groups_are_chosen[160-groups1-True]",
        ],
        "test_triton_sampling.py": [
            "test_the_tokens_are_the_references[all]",
            "test_any_size_of_vocabulary_and_rows_of_different_wishes[bfloat16-37]",
            "test_uniform_numbers_are_bit_for_bit_the_same",
            "test_likeliest_tokens[bfloat16-9001-True]",
            "test_penalties[300]",
            "test_a_bit_mask[bfloat16-33-apply_bit_mask_triton]",
        ],
        "waits_of_warps.py": [
            "test_tiles_go_from_warp_to_warps",
            "test_a_wait_that_is_left_out_is_seen[for free]",
            "test_a_wait_that_is_left_out_is_seen[for ready]",
        ],
    },
}
# Its tensor cores are others, and it has no 8-bit floats: Triton converts them by hand.
CHOSEN_FOR_AMPERE = {
    "test_triton_attention.py": ["test_against_the_reference[bfloat16-1of1+1of17+1of200-h4kv2d64-b16]"],
    "test_triton_fp8_kv_cache.py": [
        "test_attention[bfloat16-split-e5m2]",
        "test_ties_are_written_as_even_numbers",
        "test_nan_is_written_as_nan",
    ],
    "test_triton_gated_delta.py": ["test_the_rule[bfloat16-padded-h1of4]"],
    "test_triton_mamba2.py": ["test_the_scan[bfloat16-padded-g1of4]"],
    "test_triton_linear.py": ["test_scaled[bfloat16-64-65-128-128-1-int8]", "test_int4[bfloat16-64-65-128-128-1]"],
}
# What either of them launches.
ROWS = {"copy_blocks", "gate", "layer_norm", "quantized_norm", "rms_norm", "rotate_and_write", "rotate_latents"}
LAUNCHED = {
    "attention and rows": {
        *ROWS,
        *(
            "attend",
            "attend_hopper",
            "causal_conv",
            "chunk",
            "expand",
            "gated_rms_norm",
            "merge",
            "quantize_rows",
            "recurrent_rule",
            "scan",
            "shrink",
        ),
        *("chunked_scan", "group_products", "grouped_gated_norm", "recurrent_scan"),
    },
    "products and sampling": {
        *("int4_linear", "quantize_rows", "scaled_linear", "sum_splits", "unpack_int4"),
        *("choose_experts", "clamped", "experts", "gated_experts", "int4_experts", "mix_rows", "scaled_experts"),
        *("sort_pairs", "bit_mask", "likeliest", "penalize", "sample", "uniform", "gate"),
    },
}


def test_every_kernel_is_run():
    assert {f"{name}_kernel" for names in LAUNCHED.values() for name in names} == launched_kernels()


@pytest.mark.parametrize("group", CHOSEN)
def test_kernels_compiled_for_hopper_pass_their_tests(group: str, tmp_path: Path):
    launched = run(90, CHOSEN[group], tmp_path)
    assert {name.removesuffix("_kernel") for name in launched} == LAUNCHED[group]


def test_kernels_compiled_for_ampere_pass_their_tests(tmp_path: Path):
    assert run(80, CHOSEN_FOR_AMPERE, tmp_path)


def run(capability: int, chosen: dict[str, list[str]], folder: Path) -> set[str]:
    """The kernels that these tests have launched; none of them failed or was skipped."""
    plugins = ("-p", "ptx.plugin", "-p", "no:xdist", "-p", "no:cacheprovider")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    emulated = {"HEADRACE_TESTS_CAPABILITY": str(capability), "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": path}
    tests = [f"{TESTS / file}::{test}" for file, names in chosen.items() for test in names]
    command = (sys.executable, "-m", "pytest", "-q", *plugins, *tests)
    done = subprocess.run(command, env=inherited | emulated, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    launches = done.stdout.partition(f"emulated for sm_{capability}: ")[2].splitlines()[0]
    return {each.split()[0] for each in launches.split(", ")}

"""What each compiled function takes: p a pointer, i a 64-bit integer, f a float32; none returns anything."""

import ctypes

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}

SIGNATURES = {
    "headrace_rms_norm": "pippiif",
    "headrace_add_rms_norm": "ppppiif",
    "headrace_rotate_and_write": "pipppppppfpiiiii",
    "headrace_wide_rms_norm": "pippiif",
    "headrace_wide_add_rms_norm": "ppppiif",
    "headrace_wide_rotate_and_write": "pipppppppfpiiiii",
    "headrace_silu_and_mul": "pipii",
    "headrace_gelu_tanh_and_mul": "pipii",
    "headrace_linear": "pippppiii",
    "headrace_packed_product": "p",
    "headrace_float32_product": "p",
    "headrace_packed_float32_product": "p",
    "headrace_grouped_product": "p",
    "headrace_packed_grouped_product": "p",
    "headrace_packed_float32_grouped_product": "p",
    "headrace_argmax": "pipppii",
    "headrace_float32_argmax": "pipppii",
    "headrace_draw": "pippppppii",
    "headrace_float32_draw": "pippppppii",
    "headrace_rank": "pippii",
    "headrace_float32_rank": "pippii",
    "headrace_float32_apply_bit_mask": "pipiii",
    "headrace_int8_linear_bfloat16": "p",
    "headrace_int8_linear_float32": "p",
    "headrace_int8_linear_avx2": "p",
    "headrace_attention": "p",
    "headrace_float32_attention": "p",
    "headrace_gated_delta_rule": "p",
    "headrace_causal_conv": "p",
    "headrace_gated_rms_norm": "p",
    "headrace_selective_scan": "p",
    "headrace_grouped_gated_rms_norm": "p",
    "headrace_float32_gated_delta_rule": "p",
    "headrace_float32_causal_conv": "p",
    "headrace_float32_gated_rms_norm": "p",
    "headrace_float32_selective_scan": "p",
    "headrace_float32_grouped_gated_rms_norm": "p",
    "headrace_float32_rms_norm": "pippiif",
    "headrace_float32_add_rms_norm": "ppppiif",
    "headrace_float32_rotate_and_write": "pipppppppfpiiiii",
    "headrace_float32_silu_and_mul": "pipii",
    "headrace_float32_gelu_tanh_and_mul": "pipii",
}


def declare(library: ctypes.CDLL) -> None:
    """Tell `library`'s functions what they take, so that ctypes converts and counts their arguments."""
    for name, letters in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[letter] for letter in letters]
        function.restype = None

// Attention's two products on tiles of 16 by 16, with AMX and, on processors without it, with AVX-512.
//
// Both take the left side row by row as it lies in memory, and the right side as pairs of bfloat16, sixteen queries a
// row: what AMX asks for, and what AVX-512's dot product multiplies by a broadcast pair of the left side.
#pragma once

#include "attention_tile.h"

#ifdef HEADRACE_X86
#define HEADRACE_AMX \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,amx-tile,amx-bf16")))

namespace attention {

constexpr int kRowBytes = 64;

struct Amx {
    struct alignas(64) TileConfig {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };

    HEADRACE_AMX static void begin() {
        // Not on the stack: GCC takes the intrinsic to read no more than a pointer's worth of it.
        static constexpr TileConfig config;
        _tile_loadconfig(&config);
    }

    HEADRACE_AMX static void end() { _tile_release(); }

    // scores[key][query] = keys . queries, for `num_tiles` times sixteen keys; keys[i]: the first of sixteen rows that
    // lie `key_stride` elements apart; `num_steps` times 32 dimensions.
    HEADRACE_AMX static void scores(const bf16* const* keys, std::int64_t key_stride, int num_tiles,
                                    const bf16* queries, int num_steps, float* scores) {
        const std::int64_t stride = key_stride * 2;
        int i = 0;
        for (; i + 4 <= num_tiles; i += 4) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int step = 0; step < num_steps; ++step) {
                _tile_loadd(4, queries + step * 512, kRowBytes);
                _tile_loadd(5, keys[i] + step * 32, stride);
                _tile_dpbf16ps(0, 5, 4);
                _tile_loadd(6, keys[i + 1] + step * 32, stride);
                _tile_dpbf16ps(1, 6, 4);
                _tile_loadd(7, keys[i + 2] + step * 32, stride);
                _tile_dpbf16ps(2, 7, 4);
                _tile_loadd(5, keys[i + 3] + step * 32, stride);
                _tile_dpbf16ps(3, 5, 4);
            }
            _tile_stored(0, scores + i * 256, kRowBytes);
            _tile_stored(1, scores + i * 256 + 256, kRowBytes);
            _tile_stored(2, scores + i * 256 + 512, kRowBytes);
            _tile_stored(3, scores + i * 256 + 768, kRowBytes);
        }
        for (; i < num_tiles; ++i) {
            _tile_zero(0);
            for (int step = 0; step < num_steps; ++step) {
                _tile_loadd(4, queries + step * 512, kRowBytes);
                _tile_loadd(5, keys[i] + step * 32, stride);
                _tile_dpbf16ps(0, 5, 4);
            }
            _tile_stored(0, scores + i * 256, kRowBytes);
        }
    }

    // output[dim][query] += values . weights over `num_steps` times 32 keys, packed as `pack_values` and `weigh` do.
    HEADRACE_AMX static void outputs(const bf16* values, const bf16* weights, int num_steps, int head_dim,
                                     float (*output)[kLanes]) {
        const int step_size = head_dim * kStep;
        int dim = 0;
        for (; dim + 64 <= head_dim; dim += 64) {
            _tile_loadd(0, output[dim], kRowBytes);
            _tile_loadd(1, output[dim + 16], kRowBytes);
            _tile_loadd(2, output[dim + 32], kRowBytes);
            _tile_loadd(3, output[dim + 48], kRowBytes);
            for (int step = 0; step < num_steps; ++step) {
                const bf16* rows = values + step * step_size + dim * kStep;
                _tile_loadd(4, weights + step * 512, kRowBytes);
                _tile_loadd(5, rows, kRowBytes);
                _tile_dpbf16ps(0, 5, 4);
                _tile_loadd(6, rows + 512, kRowBytes);
                _tile_dpbf16ps(1, 6, 4);
                _tile_loadd(7, rows + 1024, kRowBytes);
                _tile_dpbf16ps(2, 7, 4);
                _tile_loadd(5, rows + 1536, kRowBytes);
                _tile_dpbf16ps(3, 5, 4);
            }
            _tile_stored(0, output[dim], kRowBytes);
            _tile_stored(1, output[dim + 16], kRowBytes);
            _tile_stored(2, output[dim + 32], kRowBytes);
            _tile_stored(3, output[dim + 48], kRowBytes);
        }
        for (; dim < head_dim; dim += 16) {
            _tile_loadd(0, output[dim], kRowBytes);
            for (int step = 0; step < num_steps; ++step) {
                _tile_loadd(4, weights + step * 512, kRowBytes);
                _tile_loadd(5, values + step * step_size + dim * kStep, kRowBytes);
                _tile_dpbf16ps(0, 5, 4);
            }
            _tile_stored(0, output[dim], kRowBytes);
        }
    }
};

struct Avx512 {
    HEADRACE_AVX512 static void begin() {}

    HEADRACE_AVX512 static void end() {}

    // totals[16] += rows . pairs: sixteen rows `stride` elements apart, `num_pairs` pairs of each.
    HEADRACE_INLINE void multiply(const bf16* rows, std::int64_t stride, const bf16* pairs, int num_pairs,
                                  __m512 (&totals)[16]) {
        for (int pair = 0; pair < num_pairs; ++pair) {
            const __m512bh right = reinterpret_cast<__m512bh>(_mm512_load_si512(pairs + pair * 32));
            for (int i = 0; i < 16; ++i) {
                std::int32_t left;
                std::memcpy(&left, rows + i * stride + pair * 2, sizeof left);
                totals[i] = _mm512_dpbf16_ps(totals[i], reinterpret_cast<__m512bh>(_mm512_set1_epi32(left)), right);
            }
        }
    }

    HEADRACE_AVX512 static void scores(const bf16* const* keys, std::int64_t key_stride, int num_tiles,
                                       const bf16* queries, int num_steps, float* scores) {
        for (int tile = 0; tile < num_tiles; ++tile) {
            __m512 totals[16];
            for (int i = 0; i < 16; ++i) {
                totals[i] = _mm512_setzero_ps();
            }
            multiply(keys[tile], key_stride, queries, num_steps * 16, totals);
            for (int i = 0; i < 16; ++i) {
                _mm512_store_ps(scores + (tile * 16 + i) * kLanes, totals[i]);
            }
        }
    }

    HEADRACE_AVX512 static void outputs(const bf16* values, const bf16* weights, int num_steps, int head_dim,
                                        float (*output)[kLanes]) {
        for (int dim = 0; dim < head_dim; dim += 16) {
            __m512 totals[16];
            for (int i = 0; i < 16; ++i) {
                totals[i] = _mm512_load_ps(output[dim + i]);
            }
            for (int step = 0; step < num_steps; ++step) {
                multiply(values + (step * head_dim + dim) * kStep, kStep, weights + step * 512, 16, totals);
            }
            for (int i = 0; i < 16; ++i) {
                _mm512_store_ps(output[dim + i], totals[i]);
            }
        }
    }
};

}  // namespace attention
#endif

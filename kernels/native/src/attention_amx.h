// Attention's two products on AMX's tiles of 16 by 16.
#pragma once

#include "attention_tile.h"

#ifdef HEADRACE_X86
#define HEADRACE_AMX \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,amx-tile,amx-bf16")))

namespace attention {

constexpr int kRowBytes = 64;

struct Amx {
    static constexpr int kTiles = 1;  // taken together

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

    // The values of 32 keys, of which the first is row `first_row` of a chunk: packed[key / 32][dim][key % 32].
    HEADRACE_AVX512 static void pack(const bf16* const (&rows)[kStep], int first_row, int head_dim, bf16* packed) {
        pack_values(rows, head_dim, packed + first_row * head_dim);
    }

    // scores[key][query] = keys . queries, for `num_tiles` times sixteen keys; keys[i]: the first of sixteen rows that
    // lie `key_stride` elements apart; `num_steps` times 32 dimensions.
    template <int kCount>
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

    // output[dim][query] += values . weights over `num_rows` keys from a chunk's row `first_row` on, a multiple of 32,
    // packed as `pack` and `weigh` do.
    template <int kCount>
    HEADRACE_AMX static void outputs(const bf16* values, int first_row, const bf16* weights, int num_rows,
                                     int head_dim, Tile* tiles) {
        static_assert(kCount == kTiles);
        const int step_size = head_dim * kStep, num_steps = (num_rows + kStep - 1) / kStep;
        float (*output)[kLanes] = tiles->output;
        values += first_row * head_dim;
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


}  // namespace attention
#endif

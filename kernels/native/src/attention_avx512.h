// Attention's two products with AVX-512's dot product of bfloat16.
//
// A pair of the left side, repeated in every lane, meets two tiles of queries: so keys and values come from the
// second-level cache half as often, and the first-level one holds no more than a part of a chunk's.
#pragma once

#include "attention_tile.h"

#ifdef HEADRACE_X86
namespace attention {

struct Avx512 {
    static constexpr int kTiles = 2;  // taken together

    HEADRACE_AVX512 static void begin() {}

    HEADRACE_AVX512 static void end() {}

    // The values of 32 keys, of which the first is row `first_row` of a chunk:
    // packed[dim / 16][key / 2][dim % 16][key % 2].
    HEADRACE_AVX512 static void pack(const bf16* const (&rows)[kStep], int first_row, int head_dim, bf16* packed) {
        const __m512i lower = words_side_by_side(0), upper = words_side_by_side(16);
        for (int dim = 0; dim < head_dim; dim += 32) {
            const bool is_whole = head_dim - dim >= 32;
            const __mmask32 mask = is_whole ? ~__mmask32(0) : __mmask32(0xffff);
            bf16* pairs = packed + dim * kChunk + first_row * kLanes;
            for (int i = 0; i < kStep; i += 2) {
                const __m512i even = _mm512_maskz_loadu_epi16(mask, rows[i] + dim);
                const __m512i odd = _mm512_maskz_loadu_epi16(mask, rows[i + 1] + dim);
                _mm512_store_si512(pairs + i * kLanes, _mm512_permutex2var_epi16(even, lower, odd));
                if (is_whole) {
                    _mm512_store_si512(pairs + (kChunk + i) * kLanes, _mm512_permutex2var_epi16(even, upper, odd));
                }
            }
        }
    }

    // scores[tile][key][query] = keys . queries, for `num_groups` times sixteen keys; keys[i]: the first of sixteen
    // rows that lie `key_stride` elements apart; `num_steps` times 32 dimensions.
    template <int kCount>
    HEADRACE_AVX512 static void scores(const bf16* const* keys, std::int64_t key_stride, int num_groups,
                                       const bf16* queries, int num_steps, float* scores) {
        constexpr int kRows = 16 / kCount;
        for (int row = 0; row < num_groups * 16; row += kRows) {
            Totals<kCount, kRows> totals;
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 16
                for (int i = 0; i < kRows; ++i) {
                    totals.of[tile][i] = _mm512_setzero_ps();
                }
            }
            const bf16* rows = keys[row / 16] + row % 16 * key_stride;
            multiply<kCount, kRows>(rows, key_stride, 2, queries, kMaxHeadDim * kLanes, num_steps * 16, totals);
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 16
                for (int i = 0; i < kRows; ++i) {
                    _mm512_store_ps(scores + (tile * kChunk + row + i) * kLanes, totals.of[tile][i]);
                }
            }
        }
    }

    // output[tile][dim][query] += values . weights over `num_rows` keys from a chunk's row `first_row` on, packed as
    // `pack` and `weigh` do.
    template <int kCount>
    HEADRACE_AVX512 static void outputs(const bf16* values, int first_row, const bf16* weights, int num_rows,
                                        int head_dim, Tile* tiles) {
        constexpr int kRows = 16 / kCount;
        for (int dim = 0; dim < head_dim; dim += kRows) {
            Totals<kCount, kRows> totals;
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 16
                for (int i = 0; i < kRows; ++i) {
                    totals.of[tile][i] = _mm512_load_ps(tiles[tile].output[dim + i]);
                }
            }
            const bf16* rows = values + dim / 16 * 16 * kChunk + first_row * kLanes + dim % 16 * 2;
            multiply<kCount, kRows>(rows, 2, 32, weights, kChunk * kLanes, num_rows / 2, totals);
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 16
                for (int i = 0; i < kRows; ++i) {
                    _mm512_store_ps(tiles[tile].output[dim + i], totals.of[tile][i]);
                }
            }
        }
    }

private:
    template <int kCount, int kRows>
    struct Totals {
        __m512 of[kCount][kRows];
    };

    // totals[tile] += rows . pairs: rows `row_stride` elements apart, their pairs `pair_stride` apart.
    template <int kCount, int kRows>
    HEADRACE_INLINE void multiply(const bf16* rows, std::int64_t row_stride, std::int64_t pair_stride,
                                  const bf16* pairs, std::int64_t tile_stride, int num_pairs,
                                  Totals<kCount, kRows>& totals) {
        for (int pair = 0; pair < num_pairs; ++pair) {
            __m512bh right[kCount];
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
                right[tile] = reinterpret_cast<__m512bh>(_mm512_load_si512(pairs + tile * tile_stride));
            }
            // All loops over totals are unrolled early: else the compiler keeps some in memory.
#pragma GCC unroll 16
            for (int i = 0; i < kRows; ++i) {
                std::int32_t left;
                std::memcpy(&left, rows + i * row_stride, sizeof left);
                const auto everywhere = reinterpret_cast<__m512bh>(_mm512_set1_epi32(left));
#pragma GCC unroll 2
                for (int tile = 0; tile < kCount; ++tile) {
                    totals.of[tile][i] = _mm512_dpbf16_ps(totals.of[tile][i], everywhere, right[tile]);
                }
            }
            rows += pair_stride;
            pairs += 32;
        }
    }
};

}  // namespace attention
#endif

// Attention's arithmetic over some keys for a tile of sixteen queries, in float32 with AVX-512; what it is made of is
// told in float32_attention_avx2.h.
#pragma once

#include "float32_attention_tile.h"

#ifdef HEADRACE_X86
namespace float32 {

// 2^x for x <= 0, correct to 1e-7 of itself and exact for whole numbers: equal scores' weights add up without rounding.
HEADRACE_INLINE __m512 exp2(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(2.16129149e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.2467847e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.67545155e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.54852821e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40229309e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147063e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}

struct Avx512 {
    // Taken together: what is repeated in every lane meets both, and a register is read from the cache half as often.
    static constexpr int kTiles = 2;
    static constexpr int kStep = 8;  // rows whose sums are in registers together: a chunk's are a multiple of that

    HEADRACE_INLINE __mmask16 mask_of(Lanes lanes) {
        return static_cast<__mmask16>((1u << lanes.end) - (1u << lanes.begin));
    }

    // scores[tile][key][query] = keys . queries; queries: [tile][head_dim][16]. Those of lanes at rest mean nothing.
    template <int kCount>
    HEADRACE_AVX512 static void score(const Rows& rows, const float* queries, const float* const (*)[kLanes],
                                      const Lanes (&)[kCount], float* scores) {
        for (int row = 0; row < rows.count; row += kStep) {
            const float* const* keys = rows.keys + row;
            const float *a = keys[0], *b = keys[1], *c = keys[2], *d = keys[3], *e = keys[4], *f = keys[5],
                        *g = keys[6], *h = keys[7];
            const auto left = [=](int i, int k) {
                return (i == 0 ? a : i == 1 ? b : i == 2 ? c : i == 3 ? d : i == 4 ? e : i == 5 ? f : i == 6 ? g : h) + k;
            };
            Sums<kCount> sums;
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 8
                for (int i = 0; i < kStep; ++i) {
                    sums.of[tile][i] = _mm512_setzero_ps();
                }
            }
            multiply(left, queries, kMaxHeadDim * kLanes, rows.head_dim, sums);
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 8
                for (int i = 0; i < kStep; ++i) {
                    _mm512_store_ps(scores + (tile * kChunk + row + i) * kLanes, sums.of[tile][i]);
                }
            }
        }
    }

    // output[dim][query] += values . weights, in the lanes at work alone: what another sequence's values hold, be it
    // NaN, is not passed on.
    template <int kCount>
    HEADRACE_AVX512 static void add_values(const Rows& rows, const float* weights, const Lanes (&lanes)[kCount],
                                           Tile* tiles) {
        for (int dim = 0; dim < rows.head_dim; dim += kStep) {
            Sums<kCount> sums;
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 8
                for (int i = 0; i < kStep; ++i) {
                    sums.of[tile][i] = _mm512_load_ps(tiles[tile].output[dim + i]);
                }
            }
            const auto left = [=](int i, int k) { return rows.values[k] + dim + i; };
            multiply(left, weights, kChunk * kLanes, rows.count, sums);
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
#pragma GCC unroll 8
                for (int i = 0; i < kStep; ++i) {
                    float* output = tiles[tile].output[dim + i];
                    const __m512 before = _mm512_load_ps(output);
                    _mm512_store_ps(output, _mm512_mask_mov_ps(before, mask_of(lanes[tile]), sums.of[tile][i]));
                }
            }
        }
    }

    // cap * tanh(score * scale / cap), row by row.
    HEADRACE_AVX512 static void cap_scores(float* scores, int num_rows, float scale, float cap) {
        const __m512 one = _mm512_set1_ps(1.0f), factor = _mm512_set1_ps(-2.0f * kLog2E * scale / cap);
        for (float* place = scores; place < scores + num_rows * kLanes; place += kLanes) {
            const __m512 score = _mm512_load_ps(place), size = _mm512_abs_ps(score);
            const __m512 power = exp2(_mm512_mul_ps(size, factor));
            const __m512 quotient = _mm512_div_ps(_mm512_sub_ps(one, power), _mm512_add_ps(one, power));
            // Near zero the difference has lost its digits.
            const __m512 x = _mm512_mul_ps(size, _mm512_set1_ps(scale / cap)), square = _mm512_mul_ps(x, x);
            __m512 series = _mm512_set1_ps(62.0f / 2835);
            series = _mm512_fmadd_ps(series, square, _mm512_set1_ps(-17.0f / 315));
            series = _mm512_fmadd_ps(series, square, _mm512_set1_ps(2.0f / 15));
            series = _mm512_fmadd_ps(series, square, _mm512_set1_ps(-1.0f / 3));
            series = _mm512_fmadd_ps(_mm512_mul_ps(series, square), x, x);
            const __mmask16 is_small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(0.3f), _CMP_LT_OQ);
            const __m512 tanh = _mm512_mask_mov_ps(quotient, is_small, series);
            const __m512 sign = _mm512_and_ps(score, _mm512_set1_ps(-0.0f));
            _mm512_store_ps(place, _mm512_or_ps(_mm512_mul_ps(tanh, _mm512_set1_ps(cap)), sign));
        }
    }

    // Minus infinity where a query does not see a key; row 0 is key `first_key`.
    HEADRACE_AVX512 static void mask_scores(float* scores, const Tile& tile, int first_key, int num_rows) {
        const attention::Visible visible(tile, attention::kAllLanes, first_key, first_key + num_rows);
        attention::mask_scores(scores, visible, first_key, 0, num_rows);
    }

    // From scores to weights 2^((score - highest) * factor) in their place, online (FlashAttention, arXiv 2205.14135),
    // zeros in the lanes that are not at work, whose scores may be anything.
    HEADRACE_AVX512 static void weigh(Tile& tile, float* scores, int num_rows, Lanes lanes, float factor,
                                      int head_dim) {
        const __mmask16 active = mask_of(lanes);
        const __m512 scale = _mm512_set1_ps(factor), before = _mm512_load_ps(tile.base);
        const __m512 highest = _mm512_max_ps(before, attention::maximum_of_rows(scores, num_rows));
        const __m512 base = _mm512_mask_mov_ps(before, active, highest), offset = _mm512_mul_ps(base, scale);
        __m512 sum = _mm512_setzero_ps();
        for (int row = 0; row < num_rows; ++row) {
            float* place = scores + row * kLanes;
            const __m512 power = exp2(_mm512_fmsub_ps(_mm512_load_ps(place), scale, offset));
            const __m512 weight = _mm512_mask_mov_ps(_mm512_setzero_ps(), active, power);
            _mm512_store_ps(place, weight);
            sum = _mm512_add_ps(sum, weight);
        }
        const __m512 shrink = exp2(_mm512_mul_ps(_mm512_sub_ps(before, base), scale));
        if (_mm512_cmp_ps_mask(before, base, _CMP_NEQ_UQ)) {
            attention::scale_outputs(tile, head_dim, shrink);
            _mm512_store_ps(tile.base, base);
        }
        _mm512_store_ps(tile.sum, _mm512_fmadd_ps(_mm512_load_ps(tile.sum), shrink, sum));
    }

    HEADRACE_AVX512 static void merge(Tile& tile, const Tile& other, float factor, int head_dim) {
        attention::merge(tile, other, factor, head_dim);
    }

private:
    template <int kCount>
    struct Sums {
        __m512 of[kCount][kStep];
    };

    // sums[tile][i] += left(i, k) . right[tile][k] over `depth`. left(i, k): where row i's element k is.
    template <int kCount, class Left>
    HEADRACE_INLINE void multiply(const Left& left, const float* right, int tile_stride, int depth, Sums<kCount>& sums) {
        for (int k = 0; k < depth; ++k) {
            __m512 rows[kCount];
#pragma GCC unroll 2
            for (int tile = 0; tile < kCount; ++tile) {
                rows[tile] = _mm512_load_ps(right + tile * tile_stride + k * kLanes);
            }
            // Unrolled early, or the compiler keeps the sums in memory.
#pragma GCC unroll 8
            for (int i = 0; i < kStep; ++i) {
                const __m512 everywhere = _mm512_set1_ps(*left(i, k));
#pragma GCC unroll 2
                for (int tile = 0; tile < kCount; ++tile) {
                    sums.of[tile][i] = _mm512_fmadd_ps(everywhere, rows[tile], sums.of[tile][i]);
                }
            }
        }
    }
};

}  // namespace float32
#endif

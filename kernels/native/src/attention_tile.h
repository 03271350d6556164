// What attention holds of sixteen queries while it runs over their keys, and the steps between the two products.
//
// Scores and outputs are kept transposed: a row is a key (or a dimension of the head), and its sixteen lanes are the
// queries. A query's maximum and sum are then vertical operations, and nothing is ever summed across a register.
#pragma once

#include "common.h"
#include "transpose.h"

#ifdef HEADRACE_X86
namespace attention {

constexpr int kLanes = 16;         // queries in a tile: one head of one token each
constexpr __mmask16 kAllLanes = 0xffff;
constexpr int kStep = 32;          // keys that one instruction of the second product takes
constexpr int kChunk = 128;        // keys that scores are held of at a time
constexpr int kMaxHeadDim = 512;
// Below any score, and finite, so that a query that has seen no key yet computes no NaN.
constexpr float kNoScore = -1e30f;
// Weights relative to a base that is not the highest score may add up to this before the base is raised.
constexpr float kHighestSum = 0x1p32f;
constexpr float kLog2E = 1.44269504088896f;

struct alignas(64) Tile {
    float base[kLanes];  // the raw score that a weight of one stands for: the highest so far, or near it
    float sum[kLanes];      // of the weights so far
    std::int32_t first[kLanes];  // each query sees the keys from `first` up to, not including, `last`; none: both 0
    std::int32_t last[kLanes];
    float output[kMaxHeadDim][kLanes];  // weighted values so far, not yet divided by the sum
};

// 2^x for x <= 0, correct to 1e-7 of itself.
HEADRACE_INLINE __m512 exp2_precise(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.8777841e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.9893391e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5826318e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4015361e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315308e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999994e-1f));
    return _mm512_scalef_ps(p, x);
}

// 2^x, correct to 7.5e-5 of itself, and so much more that cutting its upper half off rounds to bfloat16:
// the polynomial's values lie between 1 and 2, where half of bfloat16's last place is 2^-8.
HEADRACE_INLINE __m512i exp2_to_be_cut(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(7.8024523e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.2606716e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9583354e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9992522e-1f + 0x1p-8f));
    return _mm512_castps_si512(_mm512_scalef_ps(p, x));
}

// cap * tanh(score * scale / cap), row by row.
HEADRACE_AVX512 inline void cap_scores(float* scores, int num_rows, float scale, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f), factor = _mm512_set1_ps(-2.0f * kLog2E * scale / cap);
    for (int row = 0; row < num_rows; ++row) {
        const __m512 score = _mm512_load_ps(scores + row * kLanes);
        const __m512 power = exp2_precise(_mm512_mul_ps(_mm512_abs_ps(score), factor));
        const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, power), _mm512_add_ps(one, power));
        const __m512 sign = _mm512_and_ps(score, _mm512_set1_ps(-0.0f));
        _mm512_store_ps(scores + row * kLanes, _mm512_or_ps(_mm512_mul_ps(tanh, _mm512_set1_ps(cap)), sign));
    }
}

// Which keys each of a tile's queries sees of those from `from` to before `to`; queries outside `lanes` see none.
struct Visible {
    HEADRACE_AVX512 Visible(const Tile& tile, __mmask16 active, int from, int to)
        : lanes(active),
          first(_mm512_max_epi32(_mm512_load_si512(tile.first), _mm512_set1_epi32(from))),
          last(_mm512_min_epi32(_mm512_load_si512(tile.last), _mm512_set1_epi32(to))) {}

    __mmask16 lanes;
    __m512i first;
    __m512i last;
};

// Minus infinity where a query does not see a key, in the rows from `begin` to before `end`; row 0 is key `first_key`.
HEADRACE_AVX512 inline void mask_scores(float* scores, const Visible& visible, int first_key, int begin, int end) {
    for (int row = begin; row < end; ++row) {
        const __m512i key = _mm512_set1_epi32(first_key + row);
        const __mmask16 from_first = _mm512_mask_cmple_epi32_mask(visible.lanes, visible.first, key);
        const __mmask16 seen = _mm512_mask_cmplt_epi32_mask(from_first, key, visible.last);
        const __m512 score = _mm512_load_ps(scores + row * kLanes);
        _mm512_store_ps(scores + row * kLanes, _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen, score));
    }
}

HEADRACE_AVX512 inline void scale_outputs(Tile& tile, int head_dim, __m512 factor) {
    for (int dim = 0; dim < head_dim; ++dim) {
        _mm512_store_ps(tile.output[dim], _mm512_mul_ps(_mm512_load_ps(tile.output[dim]), factor));
    }
}

// Gives the lanes at rest back what the tile held `before` for them: the second product adds to all, and nothing times
// NaN is NaN.
HEADRACE_AVX512 inline void restore_outputs(Tile& tile, __mmask16 active, const float (*before)[kLanes], int head_dim) {
    for (int dim = 0; dim < head_dim; ++dim) {
        const __m512 now = _mm512_load_ps(tile.output[dim]);
        _mm512_store_ps(tile.output[dim], _mm512_mask_mov_ps(_mm512_load_ps(before[dim]), active, now));
    }
}

HEADRACE_INLINE __m512 maximum_of_rows(const float* scores, int num_rows) {
    __m512 even = _mm512_load_ps(scores), odd = even;
    for (int row = 0; row < num_rows; row += 2) {
        even = _mm512_max_ps(even, _mm512_load_ps(scores + row * kLanes));
        odd = _mm512_max_ps(odd, _mm512_load_ps(scores + (row + 1) * kLanes));
    }
    return _mm512_max_ps(even, odd);
}

// Weights 2^(score * scale - offset), rounded to bfloat16, two keys' side by side as the second product wants them;
// returns their sums, as rounded.
HEADRACE_AVX512 inline __m512 write_weights(const float* scores, int num_rows, __m512 scale, __m512 offset,
                                            bf16* weights) {
    // Pairs of ones: the dot product of bfloat16 adds up two rows at once.
    const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
    __m512 even_sum = _mm512_setzero_ps(), odd_sum = even_sum;
    for (int row = 0; row < num_rows; row += 4) {
        const float* source = scores + row * kLanes;
        __m512i weight[4];
        for (int i = 0; i < 4; ++i) {
            weight[i] = exp2_to_be_cut(_mm512_fmsub_ps(_mm512_load_ps(source + i * kLanes), scale, offset));
        }
        const __m512i even = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(weight[0], 16), weight[1]);
        const __m512i odd = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(weight[2], 16), weight[3]);
        _mm512_store_si512(weights + row * kLanes, even);
        _mm512_store_si512(weights + (row + 2) * kLanes, odd);
        even_sum = _mm512_dpbf16_ps(even_sum, reinterpret_cast<__m512bh>(even), ones);
        odd_sum = _mm512_dpbf16_ps(odd_sum, reinterpret_cast<__m512bh>(odd), ones);
    }
    return _mm512_add_ps(even_sum, odd_sum);
}

// From scores to weights 2^((score - base) * factor), online: where the tile's base is too low for them, it becomes the
// highest score, and what the tile holds is brought to it. Only the lanes in `active` take part. `num_rows`: a multiple
// of 16; weights are written up to a multiple of 32.
HEADRACE_AVX512 inline void weigh(Tile& tile, const float* scores, int num_rows, __mmask16 active, float factor,
                                  int head_dim, bf16* weights) {
    const __m512 nothing = _mm512_set1_ps(__builtin_inff()), scale = _mm512_set1_ps(factor);
    const __m512 before = _mm512_load_ps(tile.base);
    __m512 sum = _mm512_load_ps(tile.sum), added = nothing;
    if (!_mm512_mask_cmp_ps_mask(active, before, _mm512_set1_ps(kNoScore), _CMP_EQ_OQ)) {
        added = write_weights(scores, num_rows, scale, _mm512_mask_mul_ps(nothing, active, before, scale), weights);
    }
    if (_mm512_mask_cmp_ps_mask(active, added, _mm512_set1_ps(kHighestSum), _CMP_NLE_UQ)) {
        const __m512 base = _mm512_mask_max_ps(before, active, before, maximum_of_rows(scores, num_rows));
        const __m512 shrink = exp2_precise(_mm512_mul_ps(_mm512_sub_ps(before, base), scale));
        added = write_weights(scores, num_rows, scale, _mm512_mask_mul_ps(nothing, active, base, scale), weights);
        sum = _mm512_mul_ps(sum, shrink);
        scale_outputs(tile, head_dim, shrink);
        _mm512_store_ps(tile.base, base);
    }
    _mm512_store_ps(tile.sum, _mm512_mask_mov_ps(sum, active, _mm512_add_ps(sum, added)));
    for (int row = num_rows; row % kStep; row += 2) {
        _mm512_store_si512(weights + row * kLanes, _mm512_setzero_si512());
    }
}

// Adds to `tile` what was found over other keys.
HEADRACE_AVX512 inline void merge(Tile& tile, const Tile& other, float factor, int head_dim) {
    const __m512 scale = _mm512_set1_ps(factor);
    const __m512 mine = _mm512_load_ps(tile.base), theirs = _mm512_load_ps(other.base);
    const __m512 maximum = _mm512_max_ps(mine, theirs);
    const __m512 keep = exp2_precise(_mm512_mul_ps(_mm512_sub_ps(mine, maximum), scale));
    const __m512 take = exp2_precise(_mm512_mul_ps(_mm512_sub_ps(theirs, maximum), scale));
    const __m512 sum = _mm512_mul_ps(_mm512_load_ps(tile.sum), keep);
    _mm512_store_ps(tile.base, maximum);
    _mm512_store_ps(tile.sum, _mm512_fmadd_ps(_mm512_load_ps(other.sum), take, sum));
    for (int dim = 0; dim < head_dim; ++dim) {
        const __m512 kept = _mm512_mul_ps(_mm512_load_ps(tile.output[dim]), keep);
        _mm512_store_ps(tile.output[dim], _mm512_fmadd_ps(_mm512_load_ps(other.output[dim]), take, kept));
    }
}

// Sixteen rows of `head_dim` bfloat16 as the first product's right side: pairs of dimensions, one query a lane, zeros
// up to a multiple of 32 dimensions.
HEADRACE_AVX512 inline void pack_queries(const bf16* const (&rows)[kLanes], int head_dim, bf16* packed) {
    for (int dim = 0; dim < head_dim; dim += 32) {
        const __mmask32 mask = head_dim - dim >= 32 ? ~__mmask32(0) : __mmask32(0xffff);
        __m512i pairs[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            pairs[i] = _mm512_maskz_loadu_epi16(mask, rows[i] + dim);
        }
        transpose(pairs);
        for (int i = 0; i < kLanes; ++i) {
            _mm512_store_si512(packed + dim * kLanes + i * 32, pairs[i]);
        }
    }
}

// The values of 32 keys, one pointer a key, with dimensions as rows: packed[dim][key].
HEADRACE_AVX512 inline void pack_values(const bf16* const (&rows)[kStep], int head_dim, bf16* packed) {
    for (int dim = 0; dim < head_dim; dim += 32) {
        const __mmask32 mask = head_dim - dim >= 32 ? ~__mmask32(0) : __mmask32(0xffff);
        __m512i lower[16], upper[16];
        for (int i = 0; i < 16; ++i) {
            const __m512i even = _mm512_maskz_loadu_epi16(mask, rows[2 * i] + dim);
            const __m512i odd = _mm512_maskz_loadu_epi16(mask, rows[2 * i + 1] + dim);
            lower[i] = _mm512_unpacklo_epi16(even, odd);
            upper[i] = _mm512_unpackhi_epi16(even, odd);
        }
        transpose(lower);
        transpose(upper);
        // Unpacking works within 128 bits, that is eight dimensions: the lower half has the first four of each eight.
        const int num_rows = head_dim - dim >= 32 ? 16 : 8;
        for (int i = 0; i < num_rows; ++i) {
            bf16* row = packed + (dim + i / 4 * 8 + i % 4) * kStep;
            _mm512_store_si512(row, lower[i]);
            _mm512_store_si512(row + 4 * kStep, upper[i]);
        }
    }
}

// Divides by the sums and writes each lane's row; null: no such query.
HEADRACE_AVX512 inline void write_outputs(const Tile& tile, int head_dim, bf16* const (&rows)[kLanes]) {
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(tile.sum));
    for (int dim = 0; dim < head_dim; dim += 16) {
        __m512i values[16];
        for (int i = 0; i < 16; ++i) {
            values[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(tile.output[dim + i]), inverse));
        }
        transpose(values);
        for (int i = 0; i < kLanes; ++i) {
            if (rows[i]) {
                store(rows[i] + dim, _mm512_castsi512_ps(values[i]));
            }
        }
    }
}

}  // namespace attention
#endif

// Attention's arithmetic over some keys for a tile of sixteen queries, in float32 with AVX2.
#pragma once

#include "avx2.h"
#include "float32_attention_tile.h"

#ifdef HEADRACE_X86
namespace float32 {

// With at most so many queries of a tile at work, lanes are dimensions instead.
constexpr int kMaxFewLanes = 6;
// How many keys ahead of those at work are fetched there.
constexpr int kRowsAhead = 8;
constexpr int kElementsPerLine = 16;

HEADRACE_AVX2_INLINE __m256 half_mask(Lanes lanes, int half) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(half));
    const __m256i from_begin = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(lanes.begin - 1));
    return _mm256_castsi256_ps(_mm256_and_si256(from_begin, _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes.end), lane)));
}

HEADRACE_AVX2_INLINE void fetch(const float* row, int head_dim) {
    for (int dim = 0; dim < head_dim; dim += kElementsPerLine) {
        _mm_prefetch(reinterpret_cast<const char*>(row + dim), _MM_HINT_T0);
    }
}

// The same scores for `kCount` queries from lane `first` on, one pointer a query. A token's keys and values lie anywhere,
// so the processor cannot guess which are next: keys some rows ahead are fetched meanwhile, and the values of these rows.
template <int kCount>
HEADRACE_AVX2 void score_few(const float* const* keys, const float* const* values, int num_rows,
                             const float* const* queries, int first, int head_dim, float* scores) {
    for (int row = 0; row < num_rows; row += 2) {
        for (int i = row; i < row + 2; ++i) {
            fetch(keys[i + kRowsAhead < num_rows ? i + kRowsAhead : i], head_dim);
            fetch(values[i], head_dim);
        }
        __m256 sums[kCount][2];
#pragma GCC unroll 6
        for (int query = 0; query < kCount; ++query) {
            sums[query][0] = sums[query][1] = _mm256_setzero_ps();
        }
        for (int dim = 0; dim < head_dim; dim += avx2::kLanes) {
            const __m256 even = _mm256_loadu_ps(keys[row] + dim), odd = _mm256_loadu_ps(keys[row + 1] + dim);
#pragma GCC unroll 6
            for (int query = 0; query < kCount; ++query) {
                const __m256 own = _mm256_loadu_ps(queries[first + query] + dim);
                sums[query][0] = _mm256_fmadd_ps(even, own, sums[query][0]);
                sums[query][1] = _mm256_fmadd_ps(odd, own, sums[query][1]);
            }
        }
#pragma GCC unroll 6
        for (int query = 0; query < kCount; ++query) {
            scores[row * kLanes + first + query] = avx2::sum_of(sums[query][0]);
            scores[(row + 1) * kLanes + first + query] = avx2::sum_of(sums[query][1]);
        }
    }
}

template <int kCount>
HEADRACE_AVX2 void add_values_few(const float* const* values, int num_rows, const float* weights, int first,
                                  int head_dim, Tile& tile) {
    for (int dim = 0; dim < head_dim; dim += avx2::kLanes) {
        __m256 sums[kCount];
#pragma GCC unroll 6
        for (int query = 0; query < kCount; ++query) {
            sums[query] = _mm256_setzero_ps();
        }
        for (int row = 0; row < num_rows; ++row) {
            const __m256 value = _mm256_loadu_ps(values[row] + dim);
#pragma GCC unroll 6
            for (int query = 0; query < kCount; ++query) {
                const __m256 weight = _mm256_broadcast_ss(weights + row * kLanes + first + query);
                sums[query] = _mm256_fmadd_ps(value, weight, sums[query]);
            }
        }
        for (int query = 0; query < kCount; ++query) {
            alignas(32) float added[avx2::kLanes];
            _mm256_store_ps(added, sums[query]);
            for (int i = 0; i < avx2::kLanes; ++i) {
                tile.output[dim + i][first + query] += added[i];
            }
        }
    }
}

using ScoreFew = void (*)(const float* const*, const float* const*, int, const float* const*, int, int, float*);
using AddValuesFew = void (*)(const float* const*, int, const float*, int, int, Tile&);

// By the number of queries.
constexpr ScoreFew kScoreFew[kMaxFewLanes + 1] = {nullptr,      score_few<1>, score_few<2>, score_few<3>,
                                                  score_few<4>, score_few<5>, score_few<6>};
constexpr AddValuesFew kAddValuesFew[kMaxFewLanes + 1] = {nullptr,           add_values_few<1>, add_values_few<2>,
                                                          add_values_few<3>, add_values_few<4>, add_values_few<5>,
                                                          add_values_few<6>};

struct Avx2 {
    static constexpr int kTiles = 1;  // taken together
    static constexpr int kStep = 4;  // rows whose sums are in registers together: a chunk's are a multiple of that

    // target[i] += left(i, k) . right[k] over `depth`, rows of sixteen lanes each, in the lanes at work alone: what another
    // sequence's keys and values hold, be it NaN, is not passed on. left(i, k): where row i's element k is.
    template <class Left>
    HEADRACE_AVX2_INLINE void multiply(const Left& left, const float* right, int depth, Lanes lanes, float* target) {
        const __m256 lower = half_mask(lanes, 0), upper = half_mask(lanes, avx2::kLanes);
        __m256 sums[kStep][2];
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) {
            sums[i][0] = _mm256_load_ps(target + i * kLanes);
            sums[i][1] = _mm256_load_ps(target + i * kLanes + avx2::kLanes);
        }
        for (int k = 0; k < depth; ++k) {
            const avx2::Pair pair = avx2::load_pair(right + k * kLanes);
#pragma GCC unroll 4
            for (int i = 0; i < kStep; ++i) {
                const __m256 everywhere = _mm256_broadcast_ss(left(i, k));
                sums[i][0] = _mm256_fmadd_ps(pair.low, everywhere, sums[i][0]);
                sums[i][1] = _mm256_fmadd_ps(pair.high, everywhere, sums[i][1]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) {
            // A masked store takes several times as long.
            float* low = target + i * kLanes;
            float* high = low + avx2::kLanes;
            _mm256_store_ps(low, _mm256_blendv_ps(_mm256_load_ps(low), sums[i][0], lower));
            _mm256_store_ps(high, _mm256_blendv_ps(_mm256_load_ps(high), sums[i][1], upper));
        }
    }

    // scores[key][query] = keys . queries; queries: [head_dim][16], and where each lane's lies. The values are fetched.
    template <int kCount>
    HEADRACE_AVX2 static void score(const Rows& rows, const float* queries, const float* const (*query_rows)[kLanes],
                                    const Lanes (&lanes)[kCount], float* scores) {
        static_assert(kCount == kTiles);
        if (const int count = lanes[0].end - lanes[0].begin; count <= kMaxFewLanes) {
            kScoreFew[count](rows.keys, rows.values, rows.count, query_rows[0], lanes[0].begin, rows.head_dim, scores);
            return;
        }
        std::memset(scores, 0, rows.count * kLanes * sizeof(float));
        for (int row = 0; row < rows.count; row += kStep) {
            const float* const* keys = rows.keys + row;
            const float *a = keys[0], *b = keys[1], *c = keys[2], *d = keys[3];
            const auto left = [=](int i, int k) { return (i == 0 ? a : i == 1 ? b : i == 2 ? c : d) + k; };
            multiply(left, queries, rows.head_dim, lanes[0], scores + row * kLanes);
        }
    }

    // output[dim][query] += values . weights.
    template <int kCount>
    HEADRACE_AVX2 static void add_values(const Rows& rows, const float* weights, const Lanes (&lanes)[kCount],
                                         Tile* tiles) {
        static_assert(kCount == kTiles);
        if (const int count = lanes[0].end - lanes[0].begin; count <= kMaxFewLanes) {
            kAddValuesFew[count](rows.values, rows.count, weights, lanes[0].begin, rows.head_dim, tiles[0]);
            return;
        }
        for (int dim = 0; dim < rows.head_dim; dim += kStep) {
            const auto left = [=](int i, int k) { return rows.values[k] + dim + i; };
            multiply(left, weights, rows.count, lanes[0], tiles[0].output[dim]);
        }
    }

    // cap * tanh(score * scale / cap), row by row.
    HEADRACE_AVX2 static void cap_scores(float* scores, int num_rows, float scale, float cap) {
        const __m256 one = _mm256_set1_ps(1.0f), factor = _mm256_set1_ps(-2.0f * kLog2E * scale / cap);
        const __m256 sign_bit = _mm256_set1_ps(-0.0f);
        for (float* place = scores; place < scores + num_rows * kLanes; place += avx2::kLanes) {
            const __m256 score = _mm256_load_ps(place);
            const __m256 size = _mm256_andnot_ps(sign_bit, score), sign = _mm256_and_ps(score, sign_bit);
            const __m256 power = avx2::exp2(_mm256_mul_ps(size, factor));
            const __m256 quotient = _mm256_div_ps(_mm256_sub_ps(one, power), _mm256_add_ps(one, power));
            // Near zero the difference has lost its digits.
            const __m256 x = _mm256_mul_ps(size, _mm256_set1_ps(scale / cap)), square = _mm256_mul_ps(x, x);
            __m256 series = _mm256_set1_ps(62.0f / 2835);
            series = _mm256_fmadd_ps(series, square, _mm256_set1_ps(-17.0f / 315));
            series = _mm256_fmadd_ps(series, square, _mm256_set1_ps(2.0f / 15));
            series = _mm256_fmadd_ps(series, square, _mm256_set1_ps(-1.0f / 3));
            series = _mm256_fmadd_ps(_mm256_mul_ps(series, square), x, x);
            const __m256 is_small = _mm256_cmp_ps(x, _mm256_set1_ps(0.3f), _CMP_LT_OQ);
            const __m256 tanh = _mm256_blendv_ps(quotient, series, is_small);
            _mm256_store_ps(place, _mm256_or_ps(_mm256_mul_ps(tanh, _mm256_set1_ps(cap)), sign));
        }
    }

    // Minus infinity where a query does not see a key; row 0 is key `first_key`.
    HEADRACE_AVX2 static void mask_scores(float* scores, const Tile& tile, int first_key, int num_rows) {
        const __m256 hidden = _mm256_set1_ps(-__builtin_inff());
        for (int half = 0; half < kLanes; half += avx2::kLanes) {
            const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(tile.first + half));
            const __m256i last = _mm256_load_si256(reinterpret_cast<const __m256i*>(tile.last + half));
            for (int row = 0; row < num_rows; ++row) {
                const __m256i key = _mm256_set1_epi32(first_key + row);
                const __m256i too_early = _mm256_cmpgt_epi32(first, key), seen = _mm256_cmpgt_epi32(last, key);
                float* place = scores + row * kLanes + half;
                const __m256 mask = _mm256_castsi256_ps(_mm256_andnot_si256(too_early, seen));
                _mm256_store_ps(place, _mm256_blendv_ps(hidden, _mm256_load_ps(place), mask));
            }
        }
    }

    // Brings what half a tile's outputs hold to another base.
    HEADRACE_AVX2_INLINE void scale_outputs(Tile& tile, int half, int head_dim, __m256 factor) {
        for (int dim = 0; dim < head_dim; ++dim) {
            float* place = tile.output[dim] + half;
            _mm256_store_ps(place, _mm256_mul_ps(_mm256_load_ps(place), factor));
        }
    }

    // From scores to weights 2^((score - highest) * factor) in their place, online (FlashAttention, arXiv 2205.14135), zeros
    // in the lanes that are not at work, whose scores may be anything.
    HEADRACE_AVX2 static void weigh(Tile& tile, float* scores, int num_rows, Lanes lanes, float factor, int head_dim) {
        const __m256 scale = _mm256_set1_ps(factor);
        for (int half = 0; half < kLanes; half += avx2::kLanes) {
            const __m256 active = half_mask(lanes, half), before = _mm256_load_ps(tile.base + half);
            __m256 highest = before;
            for (int row = 0; row < num_rows; ++row) {
                highest = _mm256_max_ps(highest, _mm256_load_ps(scores + row * kLanes + half));
            }
            const __m256 base = _mm256_blendv_ps(before, highest, active), offset = _mm256_mul_ps(base, scale);
            __m256 sum = _mm256_setzero_ps();
            for (int row = 0; row < num_rows; ++row) {
                float* place = scores + row * kLanes + half;
                const __m256 power = avx2::exp2(_mm256_fmsub_ps(_mm256_load_ps(place), scale, offset));
                const __m256 weight = _mm256_and_ps(power, active);
                _mm256_store_ps(place, weight);
                sum = _mm256_add_ps(sum, weight);
            }
            const __m256 shrink = avx2::exp2(_mm256_mul_ps(_mm256_sub_ps(before, base), scale));
            if (_mm256_movemask_ps(_mm256_cmp_ps(before, base, _CMP_NEQ_UQ))) {
                scale_outputs(tile, half, head_dim, shrink);
                _mm256_store_ps(tile.base + half, base);
            }
            _mm256_store_ps(tile.sum + half, _mm256_fmadd_ps(_mm256_load_ps(tile.sum + half), shrink, sum));
        }
    }

    // Adds to `tile` what was found over other keys.
    HEADRACE_AVX2 static void merge(Tile& tile, const Tile& other, float factor, int head_dim) {
        const __m256 scale = _mm256_set1_ps(factor);
        for (int half = 0; half < kLanes; half += avx2::kLanes) {
            const __m256 mine = _mm256_load_ps(tile.base + half), theirs = _mm256_load_ps(other.base + half);
            const __m256 highest = _mm256_max_ps(mine, theirs);
            const __m256 keep = avx2::exp2(_mm256_mul_ps(_mm256_sub_ps(mine, highest), scale));
            const __m256 take = avx2::exp2(_mm256_mul_ps(_mm256_sub_ps(theirs, highest), scale));
            const __m256 sum = _mm256_mul_ps(_mm256_load_ps(tile.sum + half), keep);
            _mm256_store_ps(tile.base + half, highest);
            _mm256_store_ps(tile.sum + half, _mm256_fmadd_ps(_mm256_load_ps(other.sum + half), take, sum));
            for (int dim = 0; dim < head_dim; ++dim) {
                const __m256 kept = _mm256_mul_ps(_mm256_load_ps(tile.output[dim] + half), keep);
                const __m256 added = _mm256_fmadd_ps(_mm256_load_ps(other.output[dim] + half), take, kept);
                _mm256_store_ps(tile.output[dim] + half, added);
            }
        }
    }
};

}  // namespace float32
#endif

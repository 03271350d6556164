// One token's queries over keys that no other sequence shares, in float32 with AVX2: as float32_attention_few_avx512.h,
// eight keys at once.
#pragma once

#include "attention_few_call.h"
#include "float32_attention_avx2.h"

#ifdef HEADRACE_X86
namespace float32 {

using attention::Few;
using attention::FewResult;
using attention::kMaxFew;

struct FewAvx2 {
    HEADRACE_AVX2_INLINE __m256 sum_of_pairs(__m256 a, __m256 b) {
        return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    }

    HEADRACE_AVX2_INLINE __m256 sum_of_quads(__m256 a, __m256 b) {
        const __m256d left = _mm256_castps_pd(a), right = _mm256_castps_pd(b);
        const __m256d low = _mm256_unpacklo_pd(left, right), high = _mm256_unpackhi_pd(left, right);
        return _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
    }

    // The sums of eight registers' lanes, in their order.
    HEADRACE_AVX2_INLINE __m256 sums_of(const __m256 (&rows)[8]) {
        const __m256 lower = sum_of_quads(sum_of_pairs(rows[0], rows[1]), sum_of_pairs(rows[2], rows[3]));
        const __m256 upper = sum_of_quads(sum_of_pairs(rows[4], rows[5]), sum_of_pairs(rows[6], rows[7]));
        return _mm256_add_ps(_mm256_permute2f128_ps(lower, upper, 0x20), _mm256_permute2f128_ps(lower, upper, 0x31));
    }

    // scores[query][key - first], for a multiple of sixteen keys: what lies from `end` on means nothing.
    template <int kCount>
    HEADRACE_AVX2 static void few_scores(const Few<float>& few, int first, int end,
                                         float (&scores)[kMaxFew][kFewChunk]) {
        for (int key = first; key < end; key += 16) {
            const float* rows[16];
            for (int i = 0; i < 16; ++i) {
                rows[i] = few.span.keys[key + i < end ? key + i : end - 1];
            }
            attention::fetch_ahead(few, key);
            for (int half = 0; half < 16; half += avx2::kLanes) {
                for (int query = 0; query < kCount; ++query) {
                    __m256 sums[8];
#pragma GCC unroll 8
                    for (int i = 0; i < 8; ++i) {
                        sums[i] = _mm256_setzero_ps();
                    }
                    for (int dim = 0; dim < few.head_dim; dim += avx2::kLanes) {
                        const __m256 own = _mm256_loadu_ps(few.queries[query] + dim);
#pragma GCC unroll 8
                        for (int i = 0; i < 8; ++i) {
                            sums[i] = _mm256_fmadd_ps(_mm256_loadu_ps(rows[half + i] + dim), own, sums[i]);
                        }
                    }
                    _mm256_store_ps(scores[query] + key - first + half, sums_of(sums));
                }
            }
        }
    }

    HEADRACE_AVX2_INLINE float largest_of(__m256 x) {
        const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
    }

    // From one query's scores to its weights, in their place, and the result brought to the new maximum.
    HEADRACE_AVX2 static void few_weights(float* scores, int count, float factor, int head_dim, FewResult& result) {
        __m256 highest = _mm256_set1_ps(result.maximum);
        for (int i = 0; i < count; i += avx2::kLanes) {
            highest = _mm256_max_ps(highest, _mm256_load_ps(scores + i));
        }
        const float maximum = largest_of(highest);
        const __m256 scale = _mm256_set1_ps(factor), offset = _mm256_set1_ps(maximum * factor);
        __m256 sum = _mm256_setzero_ps();
        for (int i = 0; i < count; i += avx2::kLanes) {
            const __m256 weight = avx2::exp2(_mm256_fmsub_ps(_mm256_load_ps(scores + i), scale, offset));
            _mm256_store_ps(scores + i, weight);
            sum = _mm256_add_ps(sum, weight);
        }
        float kept = result.sum;
        if (maximum > result.maximum) {
            const __m256 shrink = avx2::exp2(_mm256_set1_ps((result.maximum - maximum) * factor));
            kept *= _mm256_cvtss_f32(shrink);
            for (int dim = 0; dim < head_dim; dim += avx2::kLanes) {
                float* output = result.output + dim;
                _mm256_store_ps(output, _mm256_mul_ps(_mm256_load_ps(output), shrink));
            }
            result.maximum = maximum;
        }
        result.sum = kept + avx2::sum_of(sum);
    }

    // Adds the weighted values of the keys from `first` to before `end`, `kVectors` registers' dimensions of them.
    template <int kCount, int kVectors>
    HEADRACE_AVX2_INLINE void add_dims(const float* const* rows, int num_rows, int dim,
                                       const float (&weights)[kMaxFew][kFewChunk], FewResult* results) {
        __m256 totals[kCount][kVectors];
#pragma GCC unroll 8
        for (int query = 0; query < kCount; ++query) {
#pragma GCC unroll 4
            for (int part = 0; part < kVectors; ++part) {
                totals[query][part] = _mm256_load_ps(results[query].output + dim + part * avx2::kLanes);
            }
        }
        for (int i = 0; i < num_rows; ++i) {
#pragma GCC unroll 8
            for (int query = 0; query < kCount; ++query) {
                const __m256 weight = _mm256_broadcast_ss(weights[query] + i);
#pragma GCC unroll 4
                for (int part = 0; part < kVectors; ++part) {
                    const __m256 value = _mm256_loadu_ps(rows[i] + dim + part * avx2::kLanes);
                    totals[query][part] = _mm256_fmadd_ps(value, weight, totals[query][part]);
                }
            }
        }
#pragma GCC unroll 8
        for (int query = 0; query < kCount; ++query) {
#pragma GCC unroll 4
            for (int part = 0; part < kVectors; ++part) {
                _mm256_store_ps(results[query].output + dim + part * avx2::kLanes, totals[query][part]);
            }
        }
    }

    template <int kCount>
    HEADRACE_AVX2 static void few_outputs(const Few<float>& few, int first, int end,
                                          const float (&weights)[kMaxFew][kFewChunk], FewResult* results) {
        // As many sums as there are registers for.
        constexpr int kVectors = kCount <= 3 ? 4 : kCount <= 6 ? 2 : 1;
        const float* rows[kFewChunk];
        for (int key = first; key < end; ++key) {
            rows[key - first] = few.span.values[key];
        }
        int dim = 0;
        for (; dim + kVectors * avx2::kLanes <= few.head_dim; dim += kVectors * avx2::kLanes) {
            add_dims<kCount, kVectors>(rows, end - first, dim, weights, results);
        }
        for (; dim < few.head_dim; dim += avx2::kLanes) {
            add_dims<kCount, 1>(rows, end - first, dim, weights, results);
        }
    }

    // Adds the results of the queries in `lanes`, each at its lane's place, to a tile.
    HEADRACE_AVX2 static void add(Tile& tile, std::uint16_t lanes, const FewResult* results, float factor,
                                  int head_dim) {
        alignas(32) float keep[kLanes], take[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            const bool is_one = lanes >> lane & 1;
            const float mine = tile.base[lane];
            const float maximum = is_one && results[lane].maximum > mine ? results[lane].maximum : mine;
            keep[lane] = (mine - maximum) * factor;
            take[lane] = is_one ? (results[lane].maximum - maximum) * factor : 0;
            tile.base[lane] = maximum;
        }
        for (int half = 0; half < kLanes; half += avx2::kLanes) {
            _mm256_store_ps(keep + half, avx2::exp2(_mm256_load_ps(keep + half)));
            _mm256_store_ps(take + half, avx2::exp2(_mm256_load_ps(take + half)));
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            if (lanes >> lane & 1) {
                tile.sum[lane] = tile.sum[lane] * keep[lane] + results[lane].sum * take[lane];
                for (int dim = 0; dim < head_dim; ++dim) {
                    float& output = tile.output[dim][lane];
                    output = output * keep[lane] + results[lane].output[dim] * take[lane];
                }
            }
        }
    }
};

}  // namespace float32
#endif

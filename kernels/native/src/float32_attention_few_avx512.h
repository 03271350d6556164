// One token's queries over keys that no other sequence shares, in float32 with AVX-512: as attention_few.h, but that
// scores are summed across registers, sixteen keys' at once.
#pragma once

#include "attention_few.h"
#include "float32_attention_avx512.h"

#ifdef HEADRACE_X86
namespace float32 {

using attention::Few;
using attention::FewResult;
using attention::kMaxFew;

struct FewAvx512 {
    HEADRACE_INLINE __m512 sum_of(__m512i a, __m512i b) {
        return _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
    }

    // The sums of sixteen registers' lanes, in their order.
    HEADRACE_INLINE __m512 sums_of(const __m512 (&rows)[16]) {
        __m512i pairs[8], quads[4], halves[2];
        for (int i = 0; i < 8; ++i) {
            const __m512i a = _mm512_castps_si512(rows[2 * i]), b = _mm512_castps_si512(rows[2 * i + 1]);
            pairs[i] = _mm512_castps_si512(sum_of(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)));
        }
        // Each 128-bit lane of a quad has a part of the sums of four rows.
        for (int i = 0; i < 4; ++i) {
            const __m512i a = pairs[2 * i], b = pairs[2 * i + 1];
            quads[i] = _mm512_castps_si512(sum_of(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)));
        }
        for (int i = 0; i < 2; ++i) {
            const __m512i a = quads[2 * i], b = quads[2 * i + 1];
            halves[i] = _mm512_castps_si512(sum_of(lanes_02(a, b), lanes_13(a, b)));
        }
        return sum_of(lanes_02(halves[0], halves[1]), lanes_13(halves[0], halves[1]));
    }

    // scores[query][key - first], for a multiple of sixteen keys: what lies from `end` on means nothing.
    template <int kCount>
    HEADRACE_AVX512 static void few_scores(const Few<float>& few, int first, int end, float (&scores)[kMaxFew][kFewChunk]) {
        for (int key = first; key < end; key += 16) {
            const float* rows[16];
            for (int i = 0; i < 16; ++i) {
                rows[i] = few.span.keys[key + i < end ? key + i : end - 1];
            }
            attention::fetch_ahead(few, key);
            for (int query = 0; query < kCount; ++query) {
                __m512 sums[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) {
                    sums[i] = _mm512_setzero_ps();
                }
                for (int dim = 0; dim < few.head_dim; dim += kLanes) {
                    const __mmask16 mask = lanes(dim, few.head_dim);
                    const __m512 own = _mm512_maskz_loadu_ps(mask, few.queries[query] + dim);
#pragma GCC unroll 16
                    for (int i = 0; i < 16; ++i) {
                        sums[i] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, rows[i] + dim), own, sums[i]);
                    }
                }
                _mm512_store_ps(scores[query] + key - first, sums_of(sums));
            }
        }
    }

    // From one query's scores to its weights, in their place, and the result brought to the new maximum.
    HEADRACE_AVX512 static void few_weights(float* scores, int count, float factor, int head_dim, FewResult& result) {
        __m512 highest = _mm512_set1_ps(result.maximum);
        for (int i = 0; i < count; i += kLanes) {
            highest = _mm512_max_ps(highest, _mm512_load_ps(scores + i));
        }
        const float maximum = _mm512_reduce_max_ps(highest);
        const __m512 scale = _mm512_set1_ps(factor), offset = _mm512_set1_ps(maximum * factor);
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < count; i += kLanes) {
            const __m512 weight = float32::exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + i), scale, offset));
            _mm512_store_ps(scores + i, weight);
            sum = _mm512_add_ps(sum, weight);
        }
        float kept = result.sum;
        if (maximum > result.maximum) {
            const __m512 shrink = float32::exp2(_mm512_set1_ps((result.maximum - maximum) * factor));
            kept *= _mm512_cvtss_f32(shrink);
            for (int dim = 0; dim < head_dim; dim += kLanes) {
                float* output = result.output + dim;
                _mm512_store_ps(output, _mm512_mul_ps(_mm512_load_ps(output), shrink));
            }
            result.maximum = maximum;
        }
        result.sum = kept + _mm512_reduce_add_ps(sum);
    }

    // Adds the weighted values of the keys from `first` to before `end`.
    template <int kCount>
    HEADRACE_AVX512 static void few_outputs(const Few<float>& few, int first, int end, const float (&weights)[kMaxFew][kFewChunk],
                                     FewResult* results) {
        // So many sums of their own keep the processor from waiting for one.
        constexpr int kVectors = kCount <= 4 ? 4 : 2;
        const float* rows[kFewChunk];
        for (int key = first; key < end; ++key) {
            rows[key - first] = few.span.values[key];
        }
        for (int dim = 0; dim < few.head_dim; dim += kVectors * kLanes) {
            __mmask16 masks[kVectors];
            __m512 totals[kCount][kVectors];
#pragma GCC unroll 4
            for (int part = 0; part < kVectors; ++part) {
                const int begin = dim + part * kLanes;
                masks[part] = begin < few.head_dim ? lanes(begin, few.head_dim) : 0;
#pragma GCC unroll 8
                for (int query = 0; query < kCount; ++query) {
                    totals[query][part] = _mm512_maskz_loadu_ps(masks[part], results[query].output + begin);
                }
            }
            for (int i = 0; i < end - first; ++i) {
                __m512 values[kVectors];
#pragma GCC unroll 4
                for (int part = 0; part < kVectors; ++part) {
                    values[part] = _mm512_maskz_loadu_ps(masks[part], rows[i] + dim + part * kLanes);
                }
#pragma GCC unroll 8
                for (int query = 0; query < kCount; ++query) {
                    const __m512 weight = _mm512_set1_ps(weights[query][i]);
#pragma GCC unroll 4
                    for (int part = 0; part < kVectors; ++part) {
                        totals[query][part] = _mm512_fmadd_ps(values[part], weight, totals[query][part]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int part = 0; part < kVectors; ++part) {
#pragma GCC unroll 8
                for (int query = 0; query < kCount; ++query) {
                    _mm512_mask_storeu_ps(results[query].output + dim + part * kLanes, masks[part], totals[query][part]);
                }
            }
        }
    }

    static void add(Tile& tile, std::uint16_t lanes, const FewResult* results, float factor, int head_dim) {
        attention::add_few(tile, lanes, results, factor, head_dim);
    }
};

}  // namespace float32
#endif

// One token's queries over keys that no other sequence shares: a decode's, with nothing to fill sixteen lanes with.
//
// Here the lanes are keys while scores are computed, and dimensions while values are added up, so a few queries take
// a few instructions a key, and reading the cache is what takes the time.
#pragma once

#include "attention_few_call.h"

#ifdef HEADRACE_X86
namespace attention {

HEADRACE_INLINE __mmask32 mask_of_dims(int dim, int head_dim) {
    return head_dim - dim >= 32 ? ~__mmask32(0) : __mmask32(0xffff);
}

// scores[query][key - first], for a multiple of sixteen keys: what lies from `end` on means nothing.
template <int kCount>
HEADRACE_AVX512 void few_scores(const Few<bf16>& few, int first, int end, float (&scores)[kMaxFew][kChunk]) {
    for (int key = first; key < end; key += 16) {
        __m512 sums[kCount][2];
        for (auto& sum : sums) {
            sum[0] = sum[1] = _mm512_setzero_ps();
        }
        const bf16* rows[16];
        for (int i = 0; i < 16; ++i) {
            rows[i] = few.span.keys[key + i < end ? key + i : end - 1];
        }
        fetch_ahead(few, key);
        for (int dim = 0; dim < few.head_dim; dim += 32) {
            const __mmask32 mask = mask_of_dims(dim, few.head_dim);
            __m512i pairs[16];
            for (int i = 0; i < 16; ++i) {
                pairs[i] = _mm512_maskz_loadu_epi16(mask, rows[i] + dim);
            }
            transpose(pairs);
            const int num_pairs = few.head_dim - dim >= 32 ? 16 : 8;
            for (int i = 0; i < num_pairs; i += 2) {
#pragma GCC unroll 8
                for (int query = 0; query < kCount; ++query) {
                    std::int32_t even, odd;
                    std::memcpy(&even, few.queries[query] + dim + 2 * i, sizeof even);
                    std::memcpy(&odd, few.queries[query] + dim + 2 * i + 2, sizeof odd);
                    sums[query][0] = _mm512_dpbf16_ps(sums[query][0], reinterpret_cast<__m512bh>(pairs[i]),
                                                      reinterpret_cast<__m512bh>(_mm512_set1_epi32(even)));
                    sums[query][1] = _mm512_dpbf16_ps(sums[query][1], reinterpret_cast<__m512bh>(pairs[i + 1]),
                                                      reinterpret_cast<__m512bh>(_mm512_set1_epi32(odd)));
                }
            }
        }
        for (int query = 0; query < kCount; ++query) {
            _mm512_store_ps(scores[query] + key - first, _mm512_add_ps(sums[query][0], sums[query][1]));
        }
    }
}

// Minus infinity for the keys that the last sixteen scores have too many.
HEADRACE_INLINE void hide_tail(float* scores, int count) {
    if (count % kLanes) {
        float* last = scores + count / kLanes * kLanes;
        const __m512 hidden = _mm512_set1_ps(-__builtin_inff());
        _mm512_store_ps(last, _mm512_mask_mov_ps(hidden, tail_mask(count), _mm512_load_ps(last)));
    }
}

// Weights of one query's scores, of bfloat16, and the result brought to the new maximum.
HEADRACE_AVX512 inline void few_weights(const float* scores, int count, float factor, int head_dim,
                                        FewResult& result, bf16* weights) {
    __m512 highest = _mm512_set1_ps(result.maximum);
    for (int i = 0; i < count; i += 16) {
        highest = _mm512_max_ps(highest, _mm512_load_ps(scores + i));
    }
    const float maximum = _mm512_reduce_max_ps(highest);
    const __m512 scale = _mm512_set1_ps(factor), offset = _mm512_set1_ps(maximum * factor);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16) {
        const __m512i weight = exp2_to_be_cut(_mm512_fmsub_ps(_mm512_load_ps(scores + i), scale, offset));
        const __m512i rounded = _mm512_and_si512(weight, _mm512_set1_epi32(0xffff0000));
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(rounded));
        _mm256_store_si256(reinterpret_cast<__m256i*>(weights + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(weight, 16)));
    }
    float kept = result.sum;
    if (maximum > result.maximum) {
        const __m512 shrink = exp2_precise(_mm512_set1_ps((result.maximum - maximum) * factor));
        kept *= _mm512_cvtss_f32(shrink);
        for (int dim = 0; dim < head_dim; dim += 16) {
            float* output = result.output + dim;
            _mm512_store_ps(output, _mm512_mul_ps(_mm512_load_ps(output), shrink));
        }
        result.maximum = maximum;
    }
    result.sum = kept + _mm512_reduce_add_ps(sum);
}

// Adds the weighted values of the keys from `first` to before `end`.
template <int kCount>
HEADRACE_AVX512 void few_outputs(const Few<bf16>& few, int first, int end, const bf16 (&weights)[kMaxFew][kChunk],
                                 FewResult* results) {
    alignas(64) static constexpr bf16 kNothing[kMaxHeadDim] = {};
    const bf16* rows[kChunk];
    const __m512i lower_words = words_side_by_side(0), upper_words = words_side_by_side(16);
    const int count = end - first, even_count = (count + 1) / 2 * 2;
    for (int i = 0; i < even_count; ++i) {
        rows[i] = i < count ? few.span.values[first + i] : kNothing;
    }
    for (int dim = 0; dim < few.head_dim; dim += 32) {
        const __mmask32 mask = mask_of_dims(dim, few.head_dim);
        __m512 totals[kCount][2];
        for (int query = 0; query < kCount; ++query) {
            totals[query][0] = _mm512_load_ps(results[query].output + dim);
            totals[query][1] = _mm512_load_ps(results[query].output + dim + 16);
        }
        for (int i = 0; i < even_count; i += 2) {
            const __m512i even = _mm512_maskz_loadu_epi16(mask, rows[i] + dim);
            const __m512i odd = _mm512_maskz_loadu_epi16(mask, rows[i + 1] + dim);
            const auto lower = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(even, lower_words, odd));
            const auto upper = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(even, upper_words, odd));
#pragma GCC unroll 8
            for (int query = 0; query < kCount; ++query) {
                std::int32_t pair;
                std::memcpy(&pair, weights[query] + i, sizeof pair);
                const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
                totals[query][0] = _mm512_dpbf16_ps(totals[query][0], lower, weight);
                totals[query][1] = _mm512_dpbf16_ps(totals[query][1], upper, weight);
            }
        }
        for (int query = 0; query < kCount; ++query) {
            _mm512_store_ps(results[query].output + dim, totals[query][0]);
            _mm512_store_ps(results[query].output + dim + 16, totals[query][1]);
        }
    }
}

template <int kCount>
HEADRACE_AVX512 void attend_few(const Few<bf16>& few, FewResult* results) {
    alignas(64) float scores[kMaxFew][kChunk];
    alignas(64) bf16 weights[kMaxFew][kChunk];
    for (int query = 0; query < kCount; ++query) {
        results[query].maximum = kNoScore;
        results[query].sum = 0;
        std::memset(results[query].output, 0, (few.head_dim + 31) / 32 * 32 * sizeof(float));
    }
    const int to = few.span.to;
    for (int first = few.span.from; first < to; first += kChunk) {
        const int end = first + kChunk < to ? first + kChunk : to, count = (end - first + 15) / 16 * 16;
        few_scores<kCount>(few, first, end, scores);
        for (int query = 0; query < kCount; ++query) {
            if (few.soft_cap < __builtin_inff()) {
                cap_scores(scores[query], count / kLanes, few.scale, few.soft_cap);
            }
            hide_tail(scores[query], end - first);
            few_weights(scores[query], count, few.factor, few.head_dim, results[query], weights[query]);
        }
        few_outputs<kCount>(few, first, end, weights, results);
    }
}

// Leaves a result for each of the queries.
using AttendFew = void (*)(const Few<bf16>&, FewResult*);

// By the number of queries.
constexpr AttendFew kAttendFew[kMaxFew + 1] = {nullptr,       attend_few<1>, attend_few<2>, attend_few<3>, attend_few<4>,
                                               attend_few<5>, attend_few<6>, attend_few<7>, attend_few<8>};

// Adds the results of the queries in `lanes`, each at its lane's place, to a tile.
HEADRACE_AVX512 inline void add_few(Tile& tile, __mmask16 lanes, const FewResult* results, float factor,
                                    int head_dim) {
    alignas(64) float maxima[kLanes], sums[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
        maxima[lane] = lanes >> lane & 1 ? results[lane].maximum : kNoScore;
        sums[lane] = lanes >> lane & 1 ? results[lane].sum : 0;
    }
    const __m512 scale = _mm512_set1_ps(factor);
    const __m512 mine = _mm512_load_ps(tile.base), theirs = _mm512_load_ps(maxima);
    const __m512 maximum = _mm512_max_ps(mine, theirs);
    const __m512 keep = exp2_precise(_mm512_mul_ps(_mm512_sub_ps(mine, maximum), scale));
    const __m512 take = exp2_precise(_mm512_mul_ps(_mm512_sub_ps(theirs, maximum), scale));
    _mm512_store_ps(tile.base, maximum);
    const __m512 sum = _mm512_mul_ps(_mm512_load_ps(tile.sum), keep);
    _mm512_store_ps(tile.sum, _mm512_fmadd_ps(_mm512_load_ps(sums), take, sum));
    for (int dim = 0; dim < head_dim; dim += 16) {
        __m512i rows[16];
        for (int lane = 0; lane < kLanes; ++lane) {
            rows[lane] = _mm512_maskz_load_epi32(lanes >> lane & 1 ? 0xffff : 0, results[lane].output + dim);
        }
        transpose(rows);
        for (int i = 0; i < 16; ++i) {
            float* output = tile.output[dim + i];
            const __m512 kept = _mm512_mul_ps(_mm512_load_ps(output), keep);
            _mm512_store_ps(output, _mm512_fmadd_ps(_mm512_castsi512_ps(rows[i]), take, kept));
        }
    }
}

}  // namespace attention
#endif

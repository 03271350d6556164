// Tokens drawn from logits, with AVX2: on processors with AVX-512 too, as much of the time goes into reading the logits.

#include "avx2.h"

#ifdef HEADRACE_X86
#include <vector>

namespace {

using avx2::kLanes;
using avx2::load;
using avx2::widened;

// Tokens whose weights are summed up before the one that was drawn is looked for among them.
constexpr std::int64_t kBlock = 128;
// Below this every other token's weight is zero in float32 anyway.
constexpr double kLeastTemperature = 1e-20;
// No weight but zero is smaller.
constexpr float kLeastWeight = 1.17549435e-38f;
// The largest weight is 1. Tokens above the first of these are nearly always all that top-k and top-p keep.
constexpr float kBounds[] = {1e-3f, 1e-6f, kLeastWeight};
constexpr float kLowest = -__builtin_inff();

HEADRACE_AVX2_INLINE float largest_of(__m256 x) {
    float lanes[kLanes], largest = kLowest;
    _mm256_storeu_ps(lanes, x);
    for (float lane : lanes) {
        largest = lane > largest ? lane : largest;
    }
    return largest;
}

// A row's tokens with their weights e^((logit - largest) / temperature), a whole number of blocks of them; those
// beyond the vocabulary have none.
struct Weights {
    std::vector<float> values, few;
    std::vector<double> sums;  // of each block
    double sum = 0;

    void resize(std::int64_t size) {
        sums.resize((size + kBlock - 1) / kBlock);
        values.resize(sums.size() * kBlock);
        few.resize(values.size());
    }

    std::int64_t num_blocks() const { return static_cast<std::int64_t>(sums.size()); }
};

template <typename Element>
HEADRACE_AVX2 float largest_logit(const Element* row, std::int64_t size) {
    __m256 largest = _mm256_set1_ps(kLowest);
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        largest = _mm256_max_ps(load(row + i), largest);
    }
    float result = largest_of(largest);
    for (; i < size; ++i) {
        const float x = widened(row[i]);
        result = x > result ? x : result;
    }
    return result;
}

// The weights of one block; returns their sum.
template <typename Element>
HEADRACE_AVX2 double weigh_block(const Element* logits, float largest, float scale, float* weights) {
    const __m256 top = _mm256_set1_ps(largest), factor = _mm256_set1_ps(scale);
    __m256 sum = _mm256_setzero_ps();
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
        const __m256 weight = avx2::exp2(_mm256_mul_ps(_mm256_sub_ps(load(logits + i), top), factor));
        _mm256_storeu_ps(weights + i, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    return avx2::sum_of(sum);
}

template <typename Element>
HEADRACE_AVX2 void weigh(const Element* row, std::int64_t size, double temperature, Weights& weights) {
    const double divisor = temperature > kLeastTemperature ? temperature : kLeastTemperature;
    const float largest = largest_logit(row, size), scale = static_cast<float>(1.4426950408889634 / divisor);
    weights.sum = 0;
    for (std::int64_t block = 0; block < weights.num_blocks(); ++block) {
        const std::int64_t begin = block * kBlock, left = size - begin;
        float* target = weights.values.data() + begin;
        if (left >= kBlock) {
            weights.sums[block] = weigh_block(row + begin, largest, scale, target);
        } else {
            float padded[kBlock];
            for (std::int64_t i = 0; i < kBlock; ++i) {
                padded[i] = i < left ? widened(row[begin + i]) : kLowest;
            }
            weights.sums[block] = weigh_block(padded, largest, scale, target);
        }
        weights.sum += weights.sums[block];
    }
}

struct Amount {
    std::int64_t count;
    double weight;
};

// Copies the weights that are at least `bound`, in their order; returns how many there are and their sum.
HEADRACE_AVX2 Amount take_from(const Weights& weights, float bound, float* few) {
    const __m256 least = _mm256_set1_ps(bound);
    Amount taken{0, 0};
    for (std::size_t i = 0; i < weights.values.size(); i += kLanes) {
        const float* values = weights.values.data() + i;
        int wanted = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(values), least, _CMP_GE_OQ));
        for (; wanted != 0; wanted &= wanted - 1) {
            const float value = values[__builtin_ctz(wanted)];
            few[taken.count++] = value;
            taken.weight += value;
        }
    }
    return taken;
}

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Moves those above `pivot` to the front; returns how many they are and their sum.
inline Amount part_above(float* values, std::int64_t count, float pivot) {
    Amount above{0, 0};
    for (std::int64_t i = 0; i < count; ++i) {
        const float value = values[i];
        const bool is_above = value > pivot;
        values[i] = values[above.count];
        values[above.count] = value;
        above.count += is_above;
        above.weight += is_above ? value : 0.0f;
    }
    return above;
}

// The smallest number, from `bound` on, above which `is_little` holds for what there is of these values: one of them,
// or the bound. `above`: what there is above it. Positive floats rise with their bits, so those are halved.
template <typename IsLittle>
float least_with_little_above(float* values, std::int64_t count, float bound, Amount& above, IsLittle is_little) {
    std::uint32_t low = bits_of(bound), high = bits_of(1.0f);
    above = {0, 0};
    while (low < high) {
        const std::uint32_t middle = low + (high - low) / 2;
        const Amount upper = part_above(values, count, from_bits(middle));
        const Amount with_upper{above.count + upper.count, above.weight + upper.weight};
        if (is_little(with_upper)) {
            above = with_upper;
            values += upper.count;
            count -= upper.count;
            high = middle;
        } else {
            count = upper.count;
            low = middle + 1;
        }
    }
    return from_bits(low);
}

// The smallest weight that top-k and top-p keep.
float least_of_likeliest(Weights& weights, std::int64_t size, std::int64_t top_k, double top_p) {
    const bool has_limit = 0 < top_k && top_k < size;
    const auto has_fewer = [&](const Amount& above) { return above.count < top_k; };
    for (float bound : kBounds) {
        const Amount taken = take_from(weights, bound, weights.few.data());
        const bool are_enough = has_limit ? taken.count >= top_k : taken.weight >= top_p * weights.sum;
        if (!are_enough && bound > kLeastWeight) {
            continue;
        }
        Amount above;
        float least = bound;
        double whole = weights.sum;
        if (has_limit) {
            least = least_with_little_above(weights.few.data(), taken.count, bound, above, has_fewer);
            whole = above.weight + static_cast<double>(top_k - above.count) * least;
            // Fewer than that many have a weight: none is left out, and of the others nothing is drawn.
            whole = taken.count < top_k ? taken.weight : whole;
        }
        if (top_p < 1) {
            const double share = top_p * whole;
            const auto has_less = [&](const Amount& above) { return above.weight < share; };
            const float nucleus = least_with_little_above(weights.few.data(), taken.count, bound, above, has_less);
            least = nucleus > least ? nucleus : least;
        }
        return least;
    }
    return 0;
}

// Leaves blocks with the sums of those weights that are at least `least`.
HEADRACE_AVX2 void sum_from(Weights& weights, float least) {
    const __m256 bound = _mm256_set1_ps(least);
    weights.sum = 0;
    for (std::int64_t block = 0; block < weights.num_blocks(); ++block) {
        const float* values = weights.values.data() + block * kBlock;
        __m256 sum = _mm256_setzero_ps();
        for (std::int64_t i = 0; i < kBlock; i += kLanes) {
            const __m256 weight = _mm256_loadu_ps(values + i);
            sum = _mm256_add_ps(sum, _mm256_and_ps(weight, _mm256_cmp_ps(weight, bound, _CMP_GE_OQ)));
        }
        weights.sums[block] = avx2::sum_of(sum);
        weights.sum += weights.sums[block];
    }
}

// The token, in the order of their ids, up to which the weights that are at least `least` make up this share of all.
std::int64_t token_at(const Weights& weights, float least, double share) {
    const double target = share * weights.sum;
    // The last block with a weight is as far as rounding can carry it, and its last token with one.
    std::int64_t chosen = 0, token = 0;
    double before = 0, end = 0;
    for (std::int64_t block = 0; block < weights.num_blocks(); ++block) {
        if (weights.sums[block] > 0) {
            chosen = block;
            before = end;
            end += weights.sums[block];
            if (end >= target) {
                break;
            }
        }
    }
    for (std::int64_t i = chosen * kBlock; i < (chosen + 1) * kBlock; ++i) {
        const float weight = weights.values[i];
        if (weight >= least && weight > 0) {
            token = i;
            before += weight;
            if (before >= target) {
                break;
            }
        }
    }
    return token;
}

// The smallest float that is not below `x`.
inline float rounded_up(double x) {
    const float near = static_cast<float>(x);
    return near < x ? __builtin_nextafterf(near, __builtin_inff()) : near;
}

template <typename Element>
void draw_tokens(const Element* logits, std::int64_t stride, const double* temperature, const std::int64_t* top_k,
                 const double* top_p, const double* min_p, const double* uniforms, std::int64_t* tokens,
                 std::int64_t num_rows, std::int64_t size) {
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (std::int64_t row = 0; row < num_rows; ++row) {
        static thread_local Weights weights;
        weights.resize(size);
        weigh(logits + row * stride, size, temperature[row], weights);
        float least = rounded_up(min_p[row]);
        if (top_k[row] > 0 || top_p[row] < 1) {
            const float likeliest = least_of_likeliest(weights, size, top_k[row], top_p[row]);
            least = likeliest > least ? likeliest : least;
        }
        if (least > 0) {
            sum_from(weights, least);
        }
        tokens[row] = token_at(weights, least, uniforms[row]);
    }
}

}  // namespace

// One token a row, as `sample_tokens` says. Rows are `stride` elements apart and `size` long; all else has one number
// a row.
HEADRACE_API void headrace_float32_draw(const float* logits, std::int64_t stride, const double* temperature,
                                        const std::int64_t* top_k, const double* top_p, const double* min_p,
                                        const double* uniforms, std::int64_t* tokens, std::int64_t num_rows,
                                        std::int64_t size) {
    draw_tokens(logits, stride, temperature, top_k, top_p, min_p, uniforms, tokens, num_rows, size);
}

HEADRACE_API void headrace_draw(const bf16* logits, std::int64_t stride, const double* temperature,
                                const std::int64_t* top_k, const double* top_p, const double* min_p,
                                const double* uniforms, std::int64_t* tokens, std::int64_t num_rows,
                                std::int64_t size) {
    draw_tokens(logits, stride, temperature, top_k, top_p, min_p, uniforms, tokens, num_rows, size);
}
#endif

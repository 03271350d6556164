// What Mamba-2's scan is called with, and how its work is shared.
#pragma once

#include "states_call.h"

#ifdef HEADRACE_X86

namespace states {

// The same as `_ScanCall` in kernels/mamba2/native.py. Strides are counted in elements.
struct ScanCall {
    const void* mixed;         // each token's inputs, then each group's B, then each group's C
    const void* dt;            // [num_tokens, num_heads]
    const float* decay_scale;  // [num_heads]
    const float* dt_bias;      // the same
    const float* skip;         // the same
    float* states;             // [num_slots, num_heads, state_dim, head_dim], a slot's dense
    void* output;              // [num_tokens, num_heads, head_dim], dense
    Slots slots;
    std::int64_t num_heads, num_groups;
    std::int64_t state_dim;  // a multiple of 16, of at most kMaxStateDim
    std::int64_t head_dim;   // a multiple of 16
    std::int64_t mixed_stride, dt_stride, slot_stride;
    std::int64_t uses_avx512;  // in float32, which AVX2 computes otherwise
    float least_step, greatest_step;
};

constexpr int kScanTokens = 4;  // that change the state together
constexpr int kScanChunk = 64;  // tokens whose B and C are made ready together
constexpr int kMaxStateDim = 256;

// Some tokens' B and C of one group of heads as float32, and their products.
struct ScanTokens {
    int count;
    // B, then C. The room between them keeps rows off each other's places in the cache.
    alignas(64) float rows[2 * kScanTokens][kMaxStateDim + 32];
    float products[kScanTokens][kScanTokens];  // of each C with the B up to its own
};

// What a head makes of these tokens.
struct ScanFactors {
    float kept[kScanTokens];     // what each token has left of the state that the first one found
    float written[kScanTokens];  // how much of each one's input is in the state after the last one
    float weights[kScanTokens][kScanTokens];  // of each token's output, what it has of the inputs up to its own
};

// The parts that a group's heads are shared in, so that all threads have some.
struct ScanParts {
    explicit ScanParts(const ScanCall& call) : heads(call.num_heads / call.num_groups) {
        const std::int64_t num_tokens = call.slots.starts[call.slots.num_sequences];
        is_worth_threads = num_tokens * call.num_heads * call.state_dim * call.head_dim > kWorkWorthThreads;
        const std::int64_t items = std::max<std::int64_t>(1, call.slots.num_sequences * call.num_groups);
        const std::int64_t wanted = is_worth_threads ? kPiecesPerThread * omp_get_max_threads() : 1;
        count = std::clamp<std::int64_t>((wanted + items - 1) / items, 1, heads);
    }

    // The first of a part's heads, of all of the group's.
    std::int64_t first_head(std::int64_t part) const { return heads * part / count; }

    std::int64_t heads, count;
    bool is_worth_threads;
};

// For each few tokens of a chunk from `token` on, what `head` makes of them.
template <class Element>
void find_scan_factors(const ScanCall& call, std::int64_t head, std::int64_t token, const ScanTokens* groups,
                       int num_groups, ScanFactors* factors) {
    const float speed = -std::exp(call.decay_scale[head]), bias = call.dt_bias[head];
    const Element* dt = static_cast<const Element*>(call.dt) + head;
    for (int g = 0; g < num_groups; ++g) {
        const ScanTokens& group = groups[g];
        ScanFactors& own = factors[g];
        float left[kScanTokens];  // what the latest token has left of what each one wrote, by its step
        for (int i = 0; i < group.count; ++i, ++token) {
            float step = softplus(widened(dt[token * call.dt_stride]) + bias);
            step = step < call.least_step ? call.least_step : step > call.greatest_step ? call.greatest_step : step;
            const float kept = std::exp(speed * step);
            own.kept[i] = i == 0 ? kept : own.kept[i - 1] * kept;
            for (int j = 0; j <= i; ++j) {
                left[j] = j == i ? step : left[j] * kept;
                own.weights[i][j] = left[j] * group.products[i][j];
            }
        }
        std::copy(left, left + group.count, own.written);
    }
}

}  // namespace states
#endif

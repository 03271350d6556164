// What the gated delta rule is called with, and how its work is shared.
#pragma once

#include "states_call.h"

#ifdef HEADRACE_X86

namespace states {

// The same as `_RuleCall` in kernels/gated_delta/native.py. Strides are counted in elements.
struct RuleCall {
    const void* mixed;         // each token's queries, keys and values
    const void* decay;         // [num_tokens, num_heads]
    const void* beta;          // the same
    const float* decay_scale;  // [num_heads]
    const float* decay_bias;   // the same
    float* states;             // [num_slots, num_heads, key_dim, value_dim], a slot's dense
    void* output;              // [num_tokens, num_heads, value_dim], dense
    Slots slots;
    std::int64_t num_heads, num_key_heads;
    std::int64_t key_dim;    // a multiple of 16, of at most kMaxKeyDim
    std::int64_t value_dim;  // a multiple of 16
    std::int64_t mixed_stride, decay_stride, beta_stride, slot_stride;
    std::int64_t uses_avx512;  // in float32, which AVX2 computes otherwise
    std::int64_t doubles_beta;
};

constexpr int kGroup = 4;   // tokens that change the state together
constexpr int kChunk = 64;  // tokens whose keys and queries are made ready together
constexpr int kMaxKeyDim = 256;
// Of a state's columns so many are one thread's, and more where there are enough others.
constexpr std::int64_t kPartColumns = 32;

// Some tokens' keys and queries of one head, ready for use, and their products among each other.
struct Group {
    int count;
    // Keys, then queries. The room between them keeps rows off each other's places in the cache.
    alignas(64) float rows[2 * kGroup][kMaxKeyDim + 32];
    float key_products[kGroup][kGroup];    // of each key with those before it
    float query_products[kGroup][kGroup];  // of each query with the keys up to its own
};

// What a head makes of a group's tokens.
struct Factors {
    float kept[kGroup];     // what each token has left of the state that the group found
    float written[kGroup];  // beta
    float left[kGroup];     // what the last token has left of each one's change
    float of_keys[kGroup][kGroup];
    float of_queries[kGroup][kGroup];
};

// The columns from `first` to before `end` of a head.
struct Columns {
    std::int64_t head, first, end;
};

// The parts that the heads of a key head are shared in, so that all threads have some.
struct Parts {
    explicit Parts(const RuleCall& call)
        : group(call.num_heads / call.num_key_heads), per_head((call.value_dim + kPartColumns - 1) / kPartColumns) {
        const std::int64_t num_tokens = call.slots.starts[call.slots.num_sequences];
        const std::int64_t work = num_tokens * call.num_heads * call.key_dim * call.value_dim;
        is_worth_threads = work > kWorkWorthThreads;
        const std::int64_t items = std::max<std::int64_t>(1, call.slots.num_sequences * call.num_key_heads);
        const std::int64_t wanted = is_worth_threads ? kPiecesPerThread * omp_get_max_threads() : 1;
        count = std::clamp<std::int64_t>((wanted + items - 1) / items, 1, group * per_head);
    }

    // The first of a part's blocks of kPartColumns, of all of the key head's.
    std::int64_t first_block(std::int64_t part) const { return group * per_head * part / count; }

    std::int64_t group, per_head, count;
    bool is_worth_threads;
};

// For each group of a chunk's tokens from `token` on, what `head` makes of it.
template <class Element>
void find_factors(const RuleCall& call, std::int64_t head, std::int64_t token, const Group* groups, int num_groups,
                  Factors* factors) {
    const float speed = -std::exp(call.decay_scale[head]), bias = call.decay_bias[head];
    const Element* decay = static_cast<const Element*>(call.decay) + head;
    const Element* beta = static_cast<const Element*>(call.beta) + head;
    const float most = call.doubles_beta ? 2.0f : 1.0f;
    for (int g = 0; g < num_groups; ++g) {
        const Group& group = groups[g];
        Factors& own = factors[g];
        float between[kGroup][kGroup];  // what token i has left of what was when j was written
        for (int i = 0; i < group.count; ++i, ++token) {
            const float kept = std::exp(speed * softplus(widened(decay[token * call.decay_stride]) + bias));
            own.written[i] = most * sigmoid(widened(beta[token * call.beta_stride]));
            own.kept[i] = i == 0 ? kept : own.kept[i - 1] * kept;
            for (int j = 0; j < i; ++j) {
                between[i][j] = j == i - 1 ? kept : between[i - 1][j] * kept;
                own.of_keys[i][j] = between[i][j] * group.key_products[i][j];
                own.of_queries[i][j] = between[i][j] * group.query_products[i][j];
            }
            own.of_queries[i][i] = group.query_products[i][i];
        }
        for (int j = 0; j < group.count; ++j) {
            own.left[j] = j == group.count - 1 ? 1.0f : between[group.count - 1][j];
        }
    }
}

}  // namespace states
#endif

// What the operations of layers with states have in common, whatever the instruction set.
#pragma once

#include "pieces.h"

#ifdef HEADRACE_X86
#include <algorithm>
#include <cmath>
#include <type_traits>

namespace states {

// Which tokens each sequence has, one at least, and where its states are.
struct Slots {
    const std::int64_t* starts;  // [num_sequences + 1], each sequence's first token
    const std::int64_t* read;    // [num_sequences]
    const std::int64_t* write;   // the same
    std::int64_t num_sequences;
};

// Some columns of a state, where they are read and where they are written: rows `stride` apart.
struct Block {
    const float* source;
    std::int64_t source_stride;
    float* target;
    std::int64_t target_stride;
};

constexpr int kLineBytes = 64;
constexpr std::int64_t kPiecesPerThread = 4;
constexpr std::int64_t kRowsWorthThreads = 8192;  // elements
constexpr std::int64_t kWorkWorthThreads = 1 << 17;  // elements of states, once for each token

// log(1 + e^x), as torch has it.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline float widened(float x) { return x; }

inline float widened(bf16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

}  // namespace states
#endif

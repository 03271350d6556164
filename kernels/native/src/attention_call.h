// What a call of attention gets, and how its queries are laid out and shared among the threads.
#pragma once

#include "attention_tile.h"

#ifdef HEADRACE_X86
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

namespace attention {

constexpr int kMaxTiles = 16;  // of a work item
// Sequences share a run of keys where this spares the reading of so many: each run costs a tile some upkeep.
constexpr int kMinSparedKeys = 64;
// A work item's keys are split among threads only into parts of at least so many.
constexpr int kMinSplit = 512;

// The same as `_Call` in kernels/paged_attention/native.py. Strides are counted in elements.
struct Call {
    const bf16* query;
    const bf16* key_cache;
    const bf16* value_cache;
    bf16* output;
    const std::int32_t* query_starts;    // [num_sequences + 1]
    const std::int32_t* context_lens;    // [num_sequences]
    const std::int32_t* block_tables;    // [num_sequences, max_blocks]
    const std::int32_t* order;           // the sequences, those with equal first blocks beside each other
    const std::int32_t* shared_blocks;   // how many blocks each one in that order has in common with the one before
    const float* sinks;                  // [num_heads], a further score of each; null: none
    std::int64_t num_sequences;
    std::int64_t max_blocks;
    std::int64_t block_bits;  // a block has 2^block_bits tokens
    std::int64_t num_heads;
    std::int64_t num_kv_heads;
    std::int64_t head_dim;
    std::int64_t query_token_stride;
    std::int64_t query_head_stride;
    std::int64_t block_stride;
    std::int64_t token_stride;
    std::int64_t head_stride;
    std::int64_t sliding_window;
    std::int64_t uses_avx512;  // in float32, which AVX2 computes otherwise
    std::int64_t uses_amx;     // in bfloat16
    float scale;
    float soft_cap;  // infinity caps nothing
};

// How a call's queries are laid out and shared among the threads.
struct Plan {
    explicit Plan(const Call& call) : lane_starts(call.num_sequences + 1) {
        const int group = static_cast<int>(call.num_heads / call.num_kv_heads);
        std::int64_t longest = 0, keys = 0;
        for (int i = 0; i < call.num_sequences; ++i) {
            const int sequence = call.order[i];
            const int length = call.query_starts[sequence + 1] - call.query_starts[sequence];
            lane_starts[i + 1] = lane_starts[i] + length * group;
            longest = std::max<std::int64_t>(longest, call.context_lens[sequence]);
            keys += call.context_lens[sequence];
        }
        num_tiles = (lane_starts.back() + kLanes - 1) / kLanes;
        const std::int64_t work = (keys / call.num_sequences) * num_tiles * call.num_kv_heads * call.head_dim;
        num_threads = work > kWorkWorthThreads ? omp_get_max_threads() : 1;
        const int num_kv_heads = static_cast<int>(call.num_kv_heads);
        tiles_per_item = best_tiles_per_item(num_kv_heads);
        items_per_head = ceil_div(num_tiles, tiles_per_item);
        num_items = items_per_head * num_kv_heads;
        if (num_items < 2 * num_threads && num_threads > 1) {
            const std::int64_t parts = (2 * num_threads + num_items - 1) / num_items;
            num_splits = static_cast<int>(std::clamp<std::int64_t>(longest / kMinSplit, 1, parts));
        }
    }

    static constexpr std::int64_t kWorkWorthThreads = 1 << 16;
    // What an item costs besides its tiles, in tiles.
    static constexpr float kItemCost = 0.3f;

    static int ceil_div(int a, int b) { return (a + b - 1) / b; }

    // The number with which the threads end soonest, an even one where there are several: two are computed together.
    // Some items more than threads even out what they differ in.
    int best_tiles_per_item(int num_kv_heads) const {
        const int most = std::min(ceil_div(num_tiles * num_kv_heads, 4 * num_threads), kMaxTiles);
        int best = 1;
        float least = time_of(1, num_kv_heads);
        for (int tiles = 2; tiles <= most + 1 && tiles <= kMaxTiles; tiles += 2) {
            if (const float time = time_of(tiles, num_kv_heads); time < least) {
                least = time;
                best = tiles;
            }
        }
        return best;
    }

    float time_of(int tiles, int num_kv_heads) const {
        const int rounds = ceil_div(ceil_div(num_tiles, tiles) * num_kv_heads, num_threads);
        return static_cast<float>(rounds) * (static_cast<float>(tiles) + kItemCost);
    }

    std::vector<int> lane_starts;  // each sequence's first lane, in the call's order
    int num_tiles = 0;
    int num_threads = 1;
    int tiles_per_item = 1;
    int items_per_head = 0;
    int num_items = 0;
    int num_splits = 1;  // parts that each item's keys are divided into
};

// One lane after the other of a KV head's queries: a sequence's tokens in turn, each with the heads of the group.
class Query {
public:
    // `sequence`, in the call's order, is the one that `lane` belongs to.
    Query(const Call& call, const Plan& plan, int kv_head, int sequence, int lane)
        : call_(call), group_(static_cast<int>(call.num_heads / call.num_kv_heads)), first_head_(kv_head * group_) {
        const int offset = lane - plan.lane_starts[sequence];
        head_ = offset % group_;
        enter(sequence, offset / group_);
    }

    // Its row in `query` and `output`.
    std::int64_t token() const { return token_; }

    std::int64_t head() const { return first_head_ + head_; }

    // How many of its sequence's keys are not after it.
    int num_keys() const { return num_keys_; }

    void next() {
        if (++head_ < group_) {
            return;
        }
        head_ = 0;
        ++token_;
        ++num_keys_;
        while (token_ == end_token_ && ++sequence_ < call_.num_sequences) {
            enter(sequence_, 0);
        }
    }

private:
    void enter(int sequence, int offset) {
        const int index = call_.order[sequence];
        sequence_ = sequence;
        token_ = call_.query_starts[index] + offset;
        end_token_ = call_.query_starts[index + 1];
        num_keys_ = static_cast<int>(call_.context_lens[index] - (end_token_ - token_) + 1);
    }

    const Call& call_;
    int group_, first_head_, head_, sequence_ = 0, num_keys_ = 0;
    std::int64_t token_ = 0, end_token_ = 0;
};

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

template <class T>
using Buffer = std::unique_ptr<T, Free>;

template <class T>
Buffer<T> make_buffer(std::size_t count) {
    return Buffer<T>(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
}

}  // namespace attention
#endif

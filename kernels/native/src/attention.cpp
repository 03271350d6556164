// Attention of new tokens over their sequences' keys and values in the paged cache; bfloat16, varlen, causal.
//
// The queries of one KV head (all sequences' new tokens, each with the heads of its group) are laid in a row, sequences
// that begin with the same blocks beside each other, and cut into tiles of sixteen. A work item is some of these tiles.
// It runs over the tree that the block tables form: keys that several of its sequences share are read once for all
// their queries (Hydragen, arXiv 2402.05099), with the softmax kept online (FlashAttention, arXiv 2205.14135), so that
// nothing has to be merged. A tile whose queries are of several sequences is computed once for each, with the others'
// lanes idle. A lone decode's few queries go another way, over the keys it shares with nobody (attention_few.h).

#include "attention_few.h"
#include "attention_products.h"

#ifdef HEADRACE_X86
#include <omp.h>

#include <algorithm>
#include <cmath>
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
    std::int64_t uses_amx;
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
        // Some items more than threads, to even out what they differ in.
        const std::int64_t wanted = (num_tiles * call.num_kv_heads + 4 * num_threads - 1) / (4 * num_threads);
        tiles_per_item = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, kMaxTiles));
        items_per_head = (num_tiles + tiles_per_item - 1) / tiles_per_item;
        num_items = items_per_head * static_cast<int>(call.num_kv_heads);
        if (num_items < 2 * num_threads && num_threads > 1) {
            const std::int64_t parts = (2 * num_threads + num_items - 1) / num_items;
            num_splits = static_cast<int>(std::clamp<std::int64_t>(longest / kMinSplit, 1, parts));
        }
    }

    static constexpr std::int64_t kWorkWorthThreads = 1 << 16;

    std::vector<int> lane_starts;  // each sequence's first lane, in the call's order
    int num_tiles = 0;
    int num_threads = 1;
    int tiles_per_item = 1;
    int items_per_head = 0;
    int num_items = 0;
    int num_splits = 1;  // parts that each item's keys are divided into
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

// A thread's own memory, kept between calls.
struct Scratch {
    Tile tiles[kMaxTiles];
    bf16 queries[kMaxTiles][kMaxHeadDim * kLanes];
    float scores[kChunk * kLanes];
    bf16 weights[kChunk * kLanes];
    bf16 values[kChunk * kMaxHeadDim];
    bf16 keys[kChunk * kMaxHeadDim];
    FewResult few;

    static Scratch& of_this_thread() {
        static thread_local Buffer<Scratch> scratch = make_buffer<Scratch>(1);
        return *scratch;
    }
};

alignas(64) constexpr bf16 kZeros[kMaxHeadDim] = {};

// One work item: some tiles of one KV head's queries.
template <class Products>
class Item {
public:
    HEADRACE_AVX512 Item(const Call& call, const Plan& plan, int index)
        : call_(call), plan_(plan), scratch_(Scratch::of_this_thread()) {
        head_dim_ = static_cast<int>(call.head_dim);
        group_ = static_cast<int>(call.num_heads / call.num_kv_heads);
        // The heads' keys lie side by side: taken one after the other, each reads lines next to those just read.
        const int num_kv_heads = static_cast<int>(call.num_kv_heads);
        kv_head_ = index % num_kv_heads;
        const int first_tile = index / num_kv_heads * plan.tiles_per_item;
        num_tiles_ = std::min(plan.tiles_per_item, plan.num_tiles - first_tile);
        first_lane_ = first_tile * kLanes;
        end_lane_ = std::min(first_lane_ + num_tiles_ * kLanes, plan.lane_starts.back());
        const auto starts = plan.lane_starts.begin(), last = plan.lane_starts.end();
        first_sequence_ = static_cast<int>(std::upper_bound(starts, last, first_lane_) - starts) - 1;
        end_sequence_ = static_cast<int>(std::lower_bound(starts, last, end_lane_) - starts);
    }

    // Attends to the keys of part `split` and leaves the result in the tiles.
    HEADRACE_AVX512 void attend(int split) {
        load_queries();
        const std::int64_t length = last_key_ - first_key_;
        const int num_splits = plan_.num_splits, next = split + 1;
        split_first_ = split == 0 ? 0 : align(first_key_ + length * split / num_splits);
        split_last_ = next == num_splits ? last_key_ : align(first_key_ + length * next / num_splits);
        attend(first_sequence_, end_sequence_, 0);
    }

    int num_tiles() const { return num_tiles_; }

    const Tile* tiles() const { return scratch_.tiles; }

    // Adds what other threads have found over other parts of the keys.
    HEADRACE_AVX512 void load(const Tile* parts, int num_parts, std::int64_t part_stride) {
        for (int i = 0; i < num_tiles_; ++i) {
            Tile& tile = scratch_.tiles[i];
            tile = parts[i];
            for (int part = 1; part < num_parts; ++part) {
                merge(tile, parts[i + part * part_stride], scale_factor(), head_dim_);
            }
        }
    }

    HEADRACE_AVX512 void write() {
        int sequence = first_sequence_;
        for (int i = 0; i < num_tiles_; ++i) {
            bf16* rows[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {
                const int place = first_lane_ + i * kLanes + lane;
                rows[lane] = place < end_lane_ ? call_.output + row_of(place, sequence) * head_dim_ : nullptr;
            }
            write_outputs(scratch_.tiles[i], head_dim_, rows);
        }
    }

private:
    // A lane's token, and its head within the group.
    struct Query {
        int token;
        int head;
    };

    // `sequence` is moved on to the one that the lane belongs to.
    Query query_of(int lane, int& sequence) const {
        while (plan_.lane_starts[sequence + 1] <= lane) {
            ++sequence;
        }
        const int offset = lane - plan_.lane_starts[sequence];
        return {offset / group_, kv_head_ * group_ + offset % group_};
    }

    std::int64_t row_of(int lane, int& sequence) const {
        const Query query = query_of(lane, sequence);
        return (call_.query_starts[call_.order[sequence]] + query.token) * call_.num_heads + query.head;
    }

    HEADRACE_AVX512 void load_queries() {
        int sequence = first_sequence_;
        first_key_ = INT32_MAX;
        last_key_ = 0;
        for (int i = 0; i < num_tiles_; ++i) {
            Tile& tile = scratch_.tiles[i];
            const bf16* rows[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {
                const int place = first_lane_ + i * kLanes + lane;
                tile.first[lane] = tile.last[lane] = 0;
                rows[lane] = kZeros;
                if (place < end_lane_) {
                    const Query query = query_of(place, sequence);
                    const int index = call_.order[sequence], start = call_.query_starts[index];
                    const int length = call_.query_starts[index + 1] - start;
                    const std::int64_t last = call_.context_lens[index] - length + query.token + 1;
                    tile.last[lane] = static_cast<int>(last);
                    tile.first[lane] = static_cast<int>(std::max<std::int64_t>(0, last - call_.sliding_window));
                    first_key_ = std::min(first_key_, tile.first[lane]);
                    last_key_ = std::max(last_key_, tile.last[lane]);
                    rows[lane] = call_.query + (start + query.token) * call_.query_token_stride +
                                 query.head * call_.query_head_stride;
                }
                tile.maximum[lane] = kNoScore;
                tile.sum[lane] = 0;
            }
            std::memset(tile.output, 0, sizeof(tile.output[0]) * head_dim_);
            pack_queries(rows, head_dim_, scratch_.queries[i]);
        }
    }

    // The sequences from `first` to before `end`, from key `from` on, which is where their shared part so far ends.
    HEADRACE_AVX512 void attend(int first, int end, int from) {
        if (end - first == 1) {
            attend_own_keys(first, from);
            return;
        }
        const std::int32_t* shared = call_.shared_blocks;
        const int depth = *std::min_element(shared + first + 1, shared + end);
        const int to = depth << call_.block_bits;
        if ((end - first - 1) * (to - from) >= kMinSparedKeys) {
            attend_keys(first, end, from, to);
            from = to;
        }
        for (int run = first; run < end;) {
            int next = run + 1;
            while (next < end && shared[next] > depth) {
                ++next;
            }
            attend(run, next, from);
            run = next;
        }
    }

    // A sequence's keys from `from` on, which it shares with no other here.
    HEADRACE_AVX512 void attend_own_keys(int sequence, int from) {
        const int index = call_.order[sequence], length = call_.query_starts[index + 1] - call_.query_starts[index];
        const int begin = std::max(plan_.lane_starts[sequence], first_lane_);
        const int count = std::min(plan_.lane_starts[sequence + 1], end_lane_) - begin;
        if (length > 1 || count > kMaxFew) {
            attend_keys(sequence, sequence + 1, from, call_.context_lens[index]);
            return;
        }
        const Tile& first_tile = scratch_.tiles[(begin - first_lane_) / kLanes];
        const int lane = (begin - first_lane_) % kLanes;
        Few few = {};
        few.span = span_of(index, std::max({from, first_tile.first[lane], split_first_}),
                           std::min(first_tile.last[lane], split_last_));
        if (few.span.from >= few.span.to) {
            return;
        }
        if (sequence + 1 < end_sequence_) {
            // It may have less to itself, or begin later: a fetch in vain does no harm.
            const int next = call_.order[sequence + 1];
            few.next = span_of(next, from, std::min<int>(call_.context_lens[next], split_last_));
        }
        few.head_dim = head_dim_;
        few.scale = call_.scale;
        few.soft_cap = call_.soft_cap;
        few.factor = scale_factor();
        for (int i = 0; i < count; ++i) {
            const int head = kv_head_ * group_ + begin - plan_.lane_starts[sequence] + i;
            few.queries[i] = call_.query + call_.query_starts[index] * call_.query_token_stride +
                             head * call_.query_head_stride;
        }
        kAttendFew[count](few, scratch_.few);
        for (int i = 0; i < count; ++i) {
            const int place = begin - first_lane_ + i;
            add_to_lane(scratch_.tiles[place / kLanes], place % kLanes, scratch_.few, i, few.factor, head_dim_);
        }
    }

    Span span_of(int index, int from, int to) const {
        return {rows_of(call_.key_cache, index), rows_of(call_.value_cache, index), from, to};
    }

    Rows rows_of(const bf16* cache, int index) const {
        return {cache + kv_head_ * call_.head_stride, call_.block_tables + index * call_.max_blocks, call_.block_bits,
                call_.block_stride, call_.token_stride};
    }

    // What a run of keys concerns of a tile.
    struct Part {
        __mmask16 lanes;
        int first, last;            // keys that any of the lanes see
        int all_first, all_last;    // keys that all of them see
    };

    HEADRACE_AVX512 Part part_of(int index, int first_lane, int end_lane) const {
        const Tile& tile = scratch_.tiles[index];
        const int offset = first_lane_ + index * kLanes;
        const int begin = std::max(first_lane - offset, 0), end = std::min(end_lane - offset, kLanes);
        const __mmask16 lanes = static_cast<__mmask16>((1u << end) - (1u << begin));
        const __m512i first = _mm512_load_si512(tile.first), last = _mm512_load_si512(tile.last);
        return {lanes, _mm512_mask_reduce_min_epi32(lanes, first), _mm512_mask_reduce_max_epi32(lanes, last),
                _mm512_mask_reduce_max_epi32(lanes, first), _mm512_mask_reduce_min_epi32(lanes, last)};
    }

    // The keys from `from` to before `to`, which all these sequences have in the same blocks.
    HEADRACE_AVX512 void attend_keys(int first_sequence, int end_sequence, int from, int to) {
        const int first_lane = std::max(plan_.lane_starts[first_sequence], first_lane_);
        const int end_lane = std::min(plan_.lane_starts[end_sequence], end_lane_);
        const int first_tile = (first_lane - first_lane_) / kLanes;
        const int end_tile = (end_lane - first_lane_ + kLanes - 1) / kLanes;
        Part parts[kMaxTiles];
        int first_seen = INT32_MAX, last_seen = 0;
        for (int tile = first_tile; tile < end_tile; ++tile) {
            parts[tile] = part_of(tile, first_lane, end_lane);
            first_seen = std::min(first_seen, parts[tile].first);
            last_seen = std::max(last_seen, parts[tile].last);
        }
        from = std::max({from, first_seen, split_first_});
        to = std::min({to, last_seen, split_last_});
        const std::int32_t* table = call_.block_tables + call_.order[first_sequence] * call_.max_blocks;
        const int unit = std::min(16, 1 << call_.block_bits);
        for (int chunk = from & -unit; chunk < to; chunk += kChunk) {
            const int end = std::min(chunk + kChunk, to);
            find_keys(table, chunk, end);
            find_values(table, chunk, std::max(chunk, from), end);
            for (int tile = first_tile; tile < end_tile; ++tile) {
                attend_tile(tile, parts[tile], chunk, std::max(chunk, from), end);
            }
        }
    }

    HEADRACE_AVX512 void attend_tile(int index, const Part& part, int chunk, int from, int to) {
        from = std::max(from, part.first);
        to = std::min(to, part.last);
        if (from >= to) {
            return;
        }
        Tile& tile = scratch_.tiles[index];
        const int first_row = (from - chunk) / kStep * kStep, end_row = (to - chunk + 15) / 16 * 16;
        const int num_rows = end_row - first_row, num_steps = (head_dim_ + 31) / 32;
        Products::scores(key_rows_ + first_row / 16, key_stride_, num_rows / 16, scratch_.queries[index], num_steps,
                         scratch_.scores);
        if (std::isfinite(call_.soft_cap)) {
            cap_scores(scratch_.scores, num_rows, call_.scale, call_.soft_cap);
        }
        // Rows before and after those that all lanes see hold keys not to be seen by some, or no keys at all.
        const int seen_first = std::clamp(std::max(from, part.all_first) - chunk - first_row, 0, num_rows);
        const int seen_last = std::clamp(std::min(to, part.all_last) - chunk - first_row, seen_first, num_rows);
        const Visible visible(tile, part.lanes, from, to);
        mask_scores(scratch_.scores, visible, chunk + first_row, 0, seen_first);
        mask_scores(scratch_.scores, visible, chunk + first_row, seen_last, num_rows);
        weigh(tile, scratch_.scores, num_rows, part.lanes, scale_factor(), head_dim_, scratch_.weights);
        Products::outputs(scratch_.values + first_row * head_dim_, scratch_.weights, (num_rows + kStep - 1) / kStep,
                          head_dim_, tile.output);
    }

    // Where the keys of a chunk lie, sixteen at a time: in the cache itself, or copied where it is cut otherwise.
    HEADRACE_AVX512 void find_keys(const std::int32_t* table, int chunk, int end) {
        const int num_tiles = (end - chunk + 15) / 16;
        if (call_.block_bits >= 4 && head_dim_ % 32 == 0) {
            key_stride_ = call_.token_stride;
            for (int i = 0; i < num_tiles; ++i) {
                key_rows_[i] = row(call_.key_cache, table, chunk + i * 16);
            }
            return;
        }
        const int padded = (head_dim_ + 31) / 32 * 32;
        key_stride_ = padded;
        for (int key = chunk; key < end; ++key) {
            bf16* copy = scratch_.keys + (key - chunk) * padded;
            std::memcpy(copy, row(call_.key_cache, table, key), head_dim_ * sizeof(bf16));
            std::memset(copy + head_dim_, 0, (padded - head_dim_) * sizeof(bf16));
        }
        for (int i = 0; i < num_tiles; ++i) {
            key_rows_[i] = scratch_.keys + i * 16 * padded;
        }
    }

    // The values of a chunk, packed; zeros for the keys outside `from` to `end`, whose slots may hold anything.
    HEADRACE_AVX512 void find_values(const std::int32_t* table, int chunk, int from, int end) {
        for (int step = chunk; step < end; step += kStep) {
            const bf16* rows[kStep];
            for (int i = 0; i < kStep; ++i) {
                const int key = step + i;
                rows[i] = from <= key && key < end ? row(call_.value_cache, table, key) : kZeros;
            }
            pack_values(rows, head_dim_, scratch_.values + (step - chunk) * head_dim_);
        }
    }

    const bf16* row(const bf16* cache, const std::int32_t* table, int key) const {
        const int offset = key & ((1 << call_.block_bits) - 1);
        return cache + table[key >> call_.block_bits] * call_.block_stride + offset * call_.token_stride +
               kv_head_ * call_.head_stride;
    }

    // What turns a difference of scores into an exponent of two.
    float scale_factor() const { return std::isfinite(call_.soft_cap) ? kLog2E : call_.scale * kLog2E; }

    static int align(std::int64_t key) { return static_cast<int>(key / kChunk * kChunk); }

    const Call& call_;
    const Plan& plan_;
    Scratch& scratch_;
    int head_dim_, group_, kv_head_;
    int num_tiles_, first_lane_, end_lane_;
    int first_sequence_, end_sequence_;  // in the call's order, the first and the last perhaps in part
    int first_key_ = 0, last_key_ = 0, split_first_ = 0, split_last_ = 0;
    const bf16* key_rows_[kChunk / 16];
    std::int64_t key_stride_ = 0;
};

template <class Products>
HEADRACE_AVX512 void run(const Call& call, const Plan& plan) {
    const bool is_split = plan.num_splits > 1;
    const std::int64_t part_stride = std::int64_t{plan.num_items} * plan.tiles_per_item;
    const Buffer<Tile> parts = make_buffer<Tile>(is_split ? part_stride * plan.num_splits : 0);
    const int num_tasks = plan.num_items * plan.num_splits;
#pragma omp parallel num_threads(plan.num_threads)
    {
        Products::begin();
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < num_tasks; ++task) {
            // The last ones first: a long chunk's last queries have the most keys.
            const int index = plan.num_items - 1 - task / plan.num_splits, split = task % plan.num_splits;
            Item<Products> item(call, plan, index);
            item.attend(split);
            if (is_split) {
                Tile* part = parts.get() + split * part_stride + index * plan.tiles_per_item;
                std::copy_n(item.tiles(), item.num_tiles(), part);
            } else {
                item.write();
            }
        }
        if (is_split) {
#pragma omp for schedule(dynamic, 1)
            for (int index = 0; index < plan.num_items; ++index) {
                Item<Products> item(call, plan, index);
                item.load(parts.get() + index * plan.tiles_per_item, plan.num_splits, part_stride);
                item.write();
            }
        }
        Products::end();
    }
}

}  // namespace attention

// Attention as kernels/paged_attention/native.py describes it.
HEADRACE_API HEADRACE_AVX512 void headrace_paged_attention(const attention::Call* call) {
    if (call->num_sequences == 0) {
        return;
    }
    const attention::Plan plan(*call);
    if (call->uses_amx) {
        attention::run<attention::Amx>(*call, plan);
    } else {
        attention::run<attention::Avx512>(*call, plan);
    }
}
#endif

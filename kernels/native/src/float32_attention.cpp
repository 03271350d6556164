// Attention of new tokens over their sequences' keys and values in the paged cache; float32, varlen, causal.
//
// Queries are laid out, shared among threads and led over the tree of block tables as in attention.cpp: keys that several
// sequences share are read once for all their queries.

#include "attention_call.h"
#include "float32_attention.h"

#ifdef HEADRACE_X86
#include <cmath>

namespace float32 {

using attention::Buffer;
using attention::Call;
using attention::kMaxTiles;
using attention::kMinSparedKeys;
using attention::kNoScore;
using attention::make_buffer;
using attention::Plan;
using attention::Query;

alignas(64) constexpr float kZeros[kMaxHeadDim] = {};

const float* floats(const bf16* pointer) { return reinterpret_cast<const float*>(pointer); }

// A thread's own memory, kept between calls.
struct Scratch {
    Tile tiles[kMaxTiles];
    float queries[kMaxTiles][kMaxHeadDim * kLanes];
    float scores[kChunk * kLanes];

    static Scratch& of_this_thread() {
        static thread_local Buffer<Scratch> scratch = make_buffer<Scratch>(1);
        return *scratch;
    }
};

// One work item: some tiles of one KV head's queries.
class Item {
public:
    Item(const Call& call, const Plan& plan, int index)
        : call_(call), plan_(plan), scratch_(Scratch::of_this_thread()) {
        head_dim_ = static_cast<int>(call.head_dim);
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
    void attend(int split) {
        load_queries();
        const std::int64_t length = last_key_ - first_key_;
        split_first_ = static_cast<int>(first_key_ + length * split / plan_.num_splits);
        split_last_ = static_cast<int>(first_key_ + length * (split + 1) / plan_.num_splits);
        attend(first_sequence_, end_sequence_, 0);
    }

    int num_tiles() const { return num_tiles_; }

    const Tile* tiles() const { return scratch_.tiles; }

    // Adds what other threads have found over other parts of the keys.
    void load(const Tile* parts, int num_parts, std::int64_t part_stride) {
        for (int i = 0; i < num_tiles_; ++i) {
            Tile& tile = scratch_.tiles[i];
            tile = parts[i];
            for (int part = 1; part < num_parts; ++part) {
                float32::merge(tile, parts[i + part * part_stride], factor(), head_dim_);
            }
        }
    }

    // Divides by the sums.
    void write() {
        float* output = reinterpret_cast<float*>(call_.output);
        Query query(call_, plan_, kv_head_, first_sequence_, first_lane_);
        for (int i = 0; i < num_tiles_; ++i) {
            const Tile& tile = scratch_.tiles[i];
            for (int lane = 0; lane < lanes_of(i); ++lane, query.next()) {
                float* row = output + (query.token() * call_.num_heads + query.head()) * head_dim_;
                const float inverse = 1.0f / tile.sum[lane];
                for (int dim = 0; dim < head_dim_; ++dim) {
                    row[dim] = tile.output[dim][lane] * inverse;
                }
            }
        }
    }

private:
    int lanes_of(int tile) const { return std::min(kLanes, end_lane_ - first_lane_ - tile * kLanes); }

    void load_queries() {
        Query query(call_, plan_, kv_head_, first_sequence_, first_lane_);
        first_key_ = INT32_MAX;
        last_key_ = 0;
        for (int i = 0; i < num_tiles_; ++i) {
            Tile& tile = scratch_.tiles[i];
            float* packed = scratch_.queries[i];
            std::fill_n(tile.first, kLanes, 0);
            std::fill_n(tile.last, kLanes, 0);
            std::fill_n(tile.base, kLanes, kNoScore);
            std::fill_n(tile.sum, kLanes, 0.0f);
            std::memset(tile.output, 0, sizeof(tile.output[0]) * head_dim_);
            std::memset(packed, 0, sizeof(float) * kLanes * head_dim_);
            for (int lane = 0; lane < lanes_of(i); ++lane, query.next()) {
                const int last = query.num_keys();
                tile.last[lane] = last;
                tile.first[lane] = static_cast<int>(std::max<std::int64_t>(0, last - call_.sliding_window));
                first_key_ = std::min(first_key_, tile.first[lane]);
                last_key_ = std::max(last_key_, last);
                const float* row = floats(call_.query) + query.token() * call_.query_token_stride +
                                   query.head() * call_.query_head_stride;
                query_rows_[i][lane] = row;
                for (int dim = 0; dim < head_dim_; ++dim) {
                    packed[dim * kLanes + lane] = row[dim];
                }
            }
        }
    }

    // The sequences from `first` to before `end`, from key `from` on, which is where their shared part so far ends.
    void attend(int first, int end, int from) {
        if (end - first == 1) {
            attend_keys(first, end, from, call_.context_lens[call_.order[first]]);
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

    // The keys from `from` to before `to`, which all these sequences have in the same blocks.
    void attend_keys(int first_sequence, int end_sequence, int from, int to) {
        const int begin = std::max(plan_.lane_starts[first_sequence], first_lane_) - first_lane_;
        const int end = std::min(plan_.lane_starts[end_sequence], end_lane_) - first_lane_;
        const std::int32_t* table = call_.block_tables + call_.order[first_sequence] * call_.max_blocks;
        // Keys that nobody sees may be anybody's: their blocks were given up when the window had passed.
        int first_seen = INT32_MAX, last_seen = 0;
        for (int lane = begin; lane < end; ++lane) {
            const Tile& tile = scratch_.tiles[lane / kLanes];
            first_seen = std::min(first_seen, tile.first[lane % kLanes]);
            last_seen = std::max(last_seen, tile.last[lane % kLanes]);
        }
        from = std::max({from, first_seen, split_first_});
        to = std::min({to, last_seen, split_last_});
        for (int chunk = from; chunk < to; chunk += kChunk) {
            const int num_keys = std::min(kChunk, to - chunk), num_rows = (num_keys + kStep - 1) / kStep * kStep;
            for (int i = 0; i < num_rows; ++i) {
                const std::int64_t offset = i < num_keys ? offset_of(table, chunk + i) : 0;
                keys_[i] = i < num_keys ? floats(call_.key_cache) + offset : kZeros;
                values_[i] = i < num_keys ? floats(call_.value_cache) + offset : kZeros;
            }
            for (int tile = begin / kLanes; tile * kLanes < end; ++tile) {
                const int offset = tile * kLanes;
                attend_tile(tile, {std::max(begin - offset, 0), std::min(end - offset, kLanes)}, chunk, num_keys, num_rows);
            }
        }
    }

    // The queries in `lanes` of a tile and a chunk's keys, of which the first is `first_key`.
    void attend_tile(int index, Lanes lanes, int first_key, int num_keys, int num_rows) {
        Tile& tile = scratch_.tiles[index];
        const auto [first, last] = std::minmax_element(tile.first + lanes.begin, tile.first + lanes.end);
        const auto [least, most] = std::minmax_element(tile.last + lanes.begin, tile.last + lanes.end);
        if (*first >= first_key + num_keys || *most <= first_key) {
            return;
        }
        const int count = lanes.end - lanes.begin;
        float* scores = scratch_.scores;
        if (count <= kMaxFew) {
            kScoreFew[count](keys_, num_rows, query_rows_[index], lanes.begin, head_dim_, scores);
        } else {
            score(keys_, num_rows, scratch_.queries[index], head_dim_, lanes, scores);
        }
        if (std::isfinite(call_.soft_cap)) {
            float32::cap_scores(scores, num_rows, call_.scale, call_.soft_cap);
        }
        if (*last > first_key || *least < first_key + num_rows) {
            float32::mask_scores(scores, tile, first_key, num_rows);
        }
        for (int row = num_keys; row < num_rows; ++row) {
            std::fill_n(scores + row * kLanes, kLanes, -INFINITY);
        }
        float32::weigh(tile, scores, num_rows, lanes, factor(), head_dim_);
        if (count <= kMaxFew) {
            kAddValuesFew[count](values_, num_rows, scores, lanes.begin, head_dim_, tile);
        } else {
            add_values(values_, num_rows, scores, head_dim_, lanes, tile);
        }
    }

    std::int64_t offset_of(const std::int32_t* table, int key) const {
        const int slot = key & ((1 << call_.block_bits) - 1);
        return table[key >> call_.block_bits] * call_.block_stride + slot * call_.token_stride +
               kv_head_ * call_.head_stride;
    }

    // What turns a difference of scores into an exponent of two.
    float factor() const { return std::isfinite(call_.soft_cap) ? kLog2E : call_.scale * kLog2E; }

    const Call& call_;
    const Plan& plan_;
    Scratch& scratch_;
    int head_dim_, kv_head_;
    int num_tiles_, first_lane_, end_lane_;
    int first_sequence_, end_sequence_;  // in the call's order, the first and the last perhaps in part
    int first_key_ = 0, last_key_ = 0, split_first_ = 0, split_last_ = 0;
    const float* query_rows_[kMaxTiles][kLanes];
    const float* keys_[kChunk];
    const float* values_[kChunk];
};

void run(const Call& call, const Plan& plan) {
    const bool is_split = plan.num_splits > 1;
    const std::int64_t part_stride = std::int64_t{plan.num_items} * plan.tiles_per_item;
    const Buffer<Tile> parts = make_buffer<Tile>(is_split ? part_stride * plan.num_splits : 0);
    const int num_tasks = plan.num_items * plan.num_splits;
#pragma omp parallel num_threads(plan.num_threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < num_tasks; ++task) {
            // The last ones first: a long chunk's last queries have the most keys.
            const int index = plan.num_items - 1 - task / plan.num_splits, split = task % plan.num_splits;
            Item item(call, plan, index);
            item.attend(split);
            if (is_split) {
                std::copy_n(item.tiles(), item.num_tiles(), parts.get() + split * part_stride + index * plan.tiles_per_item);
            } else {
                item.write();
            }
        }
        if (is_split) {
#pragma omp for schedule(dynamic, 1)
            for (int index = 0; index < plan.num_items; ++index) {
                Item item(call, plan, index);
                item.load(parts.get() + index * plan.tiles_per_item, plan.num_splits, part_stride);
                item.write();
            }
        }
    }
}

}  // namespace float32

// As `headrace_paged_attention`, all tensors of float32.
HEADRACE_API void headrace_float32_paged_attention(const attention::Call* call) {
    if (call->num_sequences > 0) {
        float32::run(*call, attention::Plan(*call));
    }
}
#endif

// A work item of attention and its walk over the tree that the block tables form; the arithmetic is its heir's.
#pragma once

#include "attention_call.h"

#ifdef HEADRACE_X86
#include <cmath>

namespace attention {

template <class Element>
alignas(64) constexpr Element kZeros[kMaxHeadDim] = {};

// What a run of keys concerns of a tile: its lanes from `begin` to before `end`.
struct Part {
    int begin, end;
    int first, last;          // keys that any of the lanes see
    int all_first, all_last;  // keys that all of them see
};

// Some tiles of one KV head's queries. `Item` is its heir, and has:
//     pack_queries(i, rows)                    one pointer a lane of tile i, to zeros where there is no query
//     attend_tiles(table, begin, end, from, to)   the keys that lanes of the tiles from `begin` to before `end` see
//     merge(tile, other)                       adds to a tile what was found over other keys
//     write_tile(tile, rows)                   divides by the sums; null: no such query
//     begin_thread(), end_thread()             around all items of a thread
template <class Item, class Element>
class Walk {
public:
    Walk(const Call& call, const Plan& plan, int index, Tile* tiles)
        : call_(call), plan_(plan), tiles_(tiles), head_dim_(static_cast<int>(call.head_dim)) {
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
        const int num_splits = plan_.num_splits, next = split + 1;
        split_first_ = split == 0 ? 0 : align(first_key_ + length * split / num_splits);
        split_last_ = next == num_splits ? last_key_ : align(first_key_ + length * next / num_splits);
        visit(first_sequence_, end_sequence_, 0);
    }

    int num_tiles() const { return num_tiles_; }

    const Tile* tiles() const { return tiles_; }

    // Adds what other threads have found over other parts of the keys.
    void load(const Tile* parts, int num_parts, std::int64_t part_stride) {
        for (int i = 0; i < num_tiles_; ++i) {
            tiles_[i] = parts[i];
            for (int part = 1; part < num_parts; ++part) {
                item().merge(tiles_[i], parts[i + part * part_stride]);
            }
        }
    }

    void write() {
        Element* output = reinterpret_cast<Element*>(call_.output);
        Query query(call_, plan_, kv_head_, first_sequence_, first_lane_);
        for (int i = 0; i < num_tiles_; ++i) {
            Element* rows[kLanes] = {};
            for (int lane = 0; lane < num_lanes(i); ++lane, query.next()) {
                rows[lane] = output + (query.token() * call_.num_heads + query.head()) * head_dim_;
                if (call_.sinks != nullptr) {
                    add_sink(tiles_[i], lane, call_.sinks[query.head()]);
                }
            }
            item().write_tile(tiles_[i], rows);
        }
    }

protected:
    // How many lanes of a tile have a query.
    int num_lanes(int tile) const { return std::min(kLanes, end_lane_ - first_lane_ - tile * kLanes); }

    // A sequence's keys from `from` on, which it shares with no other here.
    void attend_own_keys(int sequence, int from) {
        attend_keys(sequence, sequence + 1, from, call_.context_lens[call_.order[sequence]]);
    }

    // The keys from `from` to before `to`, which all these sequences have in the same blocks.
    void attend_keys(int first_sequence, int end_sequence, int from, int to) {
        const int begin = std::max(plan_.lane_starts[first_sequence], first_lane_) - first_lane_;
        const int end = std::min(plan_.lane_starts[end_sequence], end_lane_) - first_lane_;
        const int first_tile = begin / kLanes, end_tile = (end + kLanes - 1) / kLanes;
        // Keys that nobody sees may be anybody's: their blocks were given up when the window had passed.
        int first_seen = INT32_MAX, last_seen = 0;
        for (int tile = first_tile; tile < end_tile; ++tile) {
            const int offset = tile * kLanes;
            parts_[tile] = part_of(tiles_[tile], std::max(begin - offset, 0), std::min(end - offset, kLanes));
            first_seen = std::min(first_seen, parts_[tile].first);
            last_seen = std::max(last_seen, parts_[tile].last);
        }
        from = std::max({from, first_seen, split_first_});
        to = std::min({to, last_seen, split_last_});
        if (from < to) {
            const std::int32_t* table = call_.block_tables + call_.order[first_sequence] * call_.max_blocks;
            item().attend_tiles(table, first_tile, end_tile, from, to);
        }
    }

    const Element* key_row(const std::int32_t* table, int key) const { return row(call_.key_cache, table, key); }

    const Element* value_row(const std::int32_t* table, int key) const { return row(call_.value_cache, table, key); }

    // What turns a difference of scores into an exponent of two.
    float scale_factor() const { return std::isfinite(call_.soft_cap) ? kLog2E : call_.scale * kLog2E; }

    const Call& call_;
    const Plan& plan_;
    Tile* tiles_;
    int head_dim_, kv_head_;
    int num_tiles_, first_lane_, end_lane_;
    int first_sequence_, end_sequence_;  // in the call's order, the first and the last perhaps in part
    int first_key_ = 0, last_key_ = 0, split_first_ = 0, split_last_ = 0;
    const Element* query_rows_[kMaxTiles][kLanes];
    Part parts_[kMaxTiles];  // of the keys at work

private:
    Item& item() { return static_cast<Item&>(*this); }

    // It takes a share of the weights, and has no value.
    void add_sink(Tile& tile, int lane, float sink) const {
        tile.sum[lane] += std::exp2(sink * kLog2E - tile.base[lane] * scale_factor());
    }

    void load_queries() {
        const Element* queries = reinterpret_cast<const Element*>(call_.query);
        Query query(call_, plan_, kv_head_, first_sequence_, first_lane_);
        first_key_ = INT32_MAX;
        last_key_ = 0;
        for (int i = 0; i < num_tiles_; ++i) {
            Tile& tile = tiles_[i];
            std::fill_n(query_rows_[i], kLanes, kZeros<Element>);
            std::fill_n(tile.first, kLanes, 0);
            std::fill_n(tile.last, kLanes, 0);
            std::fill_n(tile.base, kLanes, kNoScore);
            std::fill_n(tile.sum, kLanes, 0.0f);
            std::memset(tile.output, 0, sizeof(tile.output[0]) * head_dim_);
            for (int lane = 0; lane < num_lanes(i); ++lane, query.next()) {
                const int last = query.num_keys();
                tile.last[lane] = last;
                tile.first[lane] = static_cast<int>(std::max<std::int64_t>(0, last - call_.sliding_window));
                first_key_ = std::min(first_key_, tile.first[lane]);
                last_key_ = std::max(last_key_, last);
                query_rows_[i][lane] =
                    queries + query.token() * call_.query_token_stride + query.head() * call_.query_head_stride;
            }
            item().pack_queries(i, query_rows_[i]);
        }
    }

    // The sequences from `first` to before `end`, from key `from` on, which is where their shared part so far ends.
    void visit(int first, int end, int from) {
        if (end - first == 1) {
            item().attend_own_keys(first, from);
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
            visit(run, next, from);
            run = next;
        }
    }

    static Part part_of(const Tile& tile, int begin, int end) {
        Part part = {begin, end, INT32_MAX, 0, 0, INT32_MAX};
        for (int lane = begin; lane < end; ++lane) {
            part.first = std::min(part.first, tile.first[lane]);
            part.last = std::max(part.last, tile.last[lane]);
            part.all_first = std::max(part.all_first, tile.first[lane]);
            part.all_last = std::min(part.all_last, tile.last[lane]);
        }
        return part;
    }

    const Element* row(const bf16* cache, const std::int32_t* table, int key) const {
        const int offset = key & ((1 << call_.block_bits) - 1);
        return reinterpret_cast<const Element*>(cache) + table[key >> call_.block_bits] * call_.block_stride +
               offset * call_.token_stride + kv_head_ * call_.head_stride;
    }

    static int align(std::int64_t key) { return static_cast<int>(key / kChunk * kChunk); }
};

// One call: its items, and parts of their keys, shared among the threads.
template <class Item>
void run(const Call& call) {
    if (call.num_sequences == 0) {
        return;
    }
    const Plan plan(call);
    const bool is_split = plan.num_splits > 1;
    const std::int64_t part_stride = std::int64_t{plan.num_items} * plan.tiles_per_item;
    const Buffer<Tile> parts = make_buffer<Tile>(is_split ? part_stride * plan.num_splits : 0);
    const int num_tasks = plan.num_items * plan.num_splits;
#pragma omp parallel num_threads(plan.num_threads)
    {
        Item::begin_thread();
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < num_tasks; ++task) {
            // The last ones first: a long chunk's last queries have the most keys.
            const int index = plan.num_items - 1 - task / plan.num_splits, split = task % plan.num_splits;
            Item item(call, plan, index);
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
                Item item(call, plan, index);
                item.load(parts.get() + index * plan.tiles_per_item, plan.num_splits, part_stride);
                item.write();
            }
        }
        Item::end_thread();
    }
}

}  // namespace attention
#endif

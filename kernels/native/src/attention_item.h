// A work item of attention: some tiles of one KV head's queries, and the walk over the keys that they see.
#pragma once

#include "attention_call.h"
#include "attention_few.h"

#ifdef HEADRACE_X86
#include <cmath>

namespace attention {

constexpr int kMaxTogether = 2;  // tiles whose products are computed together

// A thread's own memory, kept between calls.
struct Scratch {
    Tile tiles[kMaxTiles];
    bf16 queries[kMaxTiles][kMaxHeadDim * kLanes];
    float scores[kMaxTogether][kChunk * kLanes];
    bf16 weights[kMaxTogether][kChunk * kLanes];
    float before[kMaxTogether][kMaxHeadDim][kLanes];  // outputs of tiles with lanes at rest
    bf16 values[kChunk * kMaxHeadDim];
    bf16 keys[kChunk * kMaxHeadDim];
    FewResult few[kMaxTiles * kLanes];

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
        for (int i = 0; i < num_tiles_; ++i) {
            if (few_lanes_[i]) {
                add_few(scratch_.tiles[i], few_lanes_[i], scratch_.few + i * kLanes, scale_factor(), head_dim_);
            }
        }
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
        Query query(call_, plan_, kv_head_, first_sequence_, first_lane_);
        for (int i = 0; i < num_tiles_; ++i) {
            const int count = std::min(kLanes, end_lane_ - first_lane_ - i * kLanes);
            bf16* rows[kLanes] = {};
            for (int lane = 0; lane < count; ++lane, query.next()) {
                rows[lane] = call_.output + (query.token() * call_.num_heads + query.head()) * head_dim_;
            }
            write_outputs(scratch_.tiles[i], head_dim_, rows);
        }
    }

private:
    HEADRACE_AVX512 void load_queries() {
        Query query(call_, plan_, kv_head_, first_sequence_, first_lane_);
        first_key_ = INT32_MAX;
        last_key_ = 0;
        for (int i = 0; i < num_tiles_; ++i) {
            Tile& tile = scratch_.tiles[i];
            const int count = std::min(kLanes, end_lane_ - first_lane_ - i * kLanes);
            const bf16* rows[kLanes];
            std::fill_n(rows, kLanes, kZeros);
            std::fill_n(tile.first, kLanes, 0);
            std::fill_n(tile.last, kLanes, 0);
            std::fill_n(tile.base, kLanes, kNoScore);
            std::fill_n(tile.sum, kLanes, 0.0f);
            for (int lane = 0; lane < count; ++lane, query.next()) {
                const int last = query.num_keys();
                tile.last[lane] = last;
                tile.first[lane] = static_cast<int>(std::max<std::int64_t>(0, last - call_.sliding_window));
                first_key_ = std::min(first_key_, tile.first[lane]);
                last_key_ = std::max(last_key_, last);
                rows[lane] = call_.query + query.token() * call_.query_token_stride +
                             query.head() * call_.query_head_stride;
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
        const int place = begin - first_lane_;
        kAttendFew[count](few, scratch_.few + place);
        for (int i = place; i < place + count; ++i) {
            few_lanes_[i / kLanes] |= 1u << i % kLanes;
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
            attend_chunk(first_tile, end_tile, parts, chunk, std::max(chunk, from), end);
        }
    }

    HEADRACE_AVX512 void attend_chunk(int first_tile, int end_tile, const Part* parts, int chunk, int from, int to) {
        int tile = first_tile;
        for (; tile + Products::kTiles <= end_tile; tile += Products::kTiles) {
            attend_tiles<Products::kTiles>(tile, parts + tile, chunk, from, to);
        }
        for (; tile < end_tile; ++tile) {
            attend_tiles<1>(tile, parts + tile, chunk, from, to);
        }
    }

    // `kCount` tiles from `index` on and the keys of a chunk that any of them sees.
    template <int kCount>
    HEADRACE_AVX512 void attend_tiles(int index, const Part* parts, int chunk, int from, int to) {
        int first_seen = parts[0].first, last_seen = parts[0].last;
        for (int i = 1; i < kCount; ++i) {
            first_seen = std::min(first_seen, parts[i].first);
            last_seen = std::max(last_seen, parts[i].last);
        }
        from = std::max(from, first_seen);
        to = std::min(to, last_seen);
        if (from >= to) {
            return;
        }
        const int first_row = (from - chunk) / kStep * kStep, end_row = (to - chunk + 15) / 16 * 16;
        const int num_rows = end_row - first_row, num_steps = (head_dim_ + 31) / 32;
        Products::template scores<kCount>(key_rows_ + first_row / 16, key_stride_, num_rows / 16,
                                          scratch_.queries[index], num_steps, scratch_.scores[0]);
        for (int i = 0; i < kCount; ++i) {
            Tile& tile = scratch_.tiles[index + i];
            weigh_tile(tile, parts[i], chunk + first_row, num_rows, from, to, i);
            if (parts[i].lanes != kAllLanes) {
                std::memcpy(scratch_.before[i], tile.output, sizeof(tile.output[0]) * head_dim_);
            }
        }
        Products::template outputs<kCount>(scratch_.values, first_row, scratch_.weights[0], num_rows, head_dim_,
                                           scratch_.tiles + index);
        for (int i = 0; i < kCount; ++i) {
            if (parts[i].lanes != kAllLanes) {
                restore_outputs(scratch_.tiles[index + i], parts[i].lanes, scratch_.before[i], head_dim_);
            }
        }
    }

    // From a tile's scores to its weights; they are the tile `place` of those taken together, row 0 is `first_key`.
    HEADRACE_AVX512 void weigh_tile(Tile& tile, const Part& part, int first_key, int num_rows, int from, int to,
                                    int place) {
        float* scores = scratch_.scores[place];
        if (std::isfinite(call_.soft_cap)) {
            cap_scores(scores, num_rows, call_.scale, call_.soft_cap);
        }
        // Rows before and after those that all lanes see hold keys not to be seen by some, or no keys at all.
        const int seen_first = std::clamp(std::max(from, part.all_first) - first_key, 0, num_rows);
        const int seen_last = std::clamp(std::min(to, part.all_last) - first_key, seen_first, num_rows);
        const Visible visible(tile, part.lanes, from, to);
        mask_scores(scores, visible, first_key, 0, seen_first);
        mask_scores(scores, visible, first_key, seen_last, num_rows);
        weigh(tile, scores, num_rows, part.lanes, scale_factor(), head_dim_, scratch_.weights[place]);
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
            Products::pack(rows, step - chunk, head_dim_, scratch_.values);
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
    __mmask16 few_lanes_[kMaxTiles] = {};  // of each tile, those that attend_few has results of
    const bf16* key_rows_[kChunk / 16];
    std::int64_t key_stride_ = 0;
};

}  // namespace attention
#endif

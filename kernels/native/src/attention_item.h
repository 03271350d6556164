// A work item of attention in bfloat16: what its walk does with the keys that its queries see.
#pragma once

#include "attention_few.h"
#include "attention_few_walk.h"

#ifdef HEADRACE_X86
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

template <class Products>
class Item : public FewWalk<Item<Products>, bf16> {
    using Base = FewWalk<Item<Products>, bf16>;
    friend Base;
    friend Walk<Item<Products>, bf16>;
    using Base::call_, Base::head_dim_, Base::parts_, Base::scale_factor, Base::key_row, Base::value_row;

public:
    Item(const Call& call, const Plan& plan, int index)
        : Base(call, plan, index, Scratch::of_this_thread().tiles, Scratch::of_this_thread().few),
          scratch_(Scratch::of_this_thread()) {}

    static void begin_thread() { Products::begin(); }

    static void end_thread() { Products::end(); }

private:
    HEADRACE_AVX512 void pack_queries(int tile, const bf16* const (&rows)[kLanes]) {
        attention::pack_queries(rows, head_dim_, scratch_.queries[tile]);
    }

    HEADRACE_AVX512 void merge(Tile& tile, const Tile& other) const {
        attention::merge(tile, other, scale_factor(), head_dim_);
    }

    HEADRACE_AVX512 void write_tile(const Tile& tile, bf16* const (&rows)[kLanes]) const {
        write_outputs(tile, head_dim_, rows);
    }

    static void attend_few(int count, const Few<bf16>& few, FewResult* results) { kAttendFew[count](few, results); }

    void add_few(Tile& tile, std::uint16_t lanes, const FewResult* results) const {
        attention::add_few(tile, lanes, results, scale_factor(), head_dim_);
    }

    HEADRACE_AVX512 void attend_tiles(const std::int32_t* table, int begin, int end, int from, int to) {
        const int unit = std::min(16, 1 << call_.block_bits);
        for (int chunk = from & -unit; chunk < to; chunk += kChunk) {
            const int first = std::max(chunk, from), last = std::min(chunk + kChunk, to);
            find_keys(table, chunk, last);
            find_values(table, chunk, first, last);
            int tile = begin;
            for (; tile + Products::kTiles <= end; tile += Products::kTiles) {
                attend_chunk<Products::kTiles>(tile, chunk, first, last);
            }
            for (; tile < end; ++tile) {
                attend_chunk<1>(tile, chunk, first, last);
            }
        }
    }

    // `kCount` tiles from `index` on and the keys of a chunk that any of them sees.
    template <int kCount>
    HEADRACE_AVX512 void attend_chunk(int index, int chunk, int from, int to) {
        const Part* parts = parts_ + index;
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
            if (has_others(index + i)) {
                std::memcpy(scratch_.before[i], tile.output, sizeof(tile.output[0]) * head_dim_);
            }
        }
        Products::template outputs<kCount>(scratch_.values, first_row, scratch_.weights[0], num_rows, head_dim_,
                                           scratch_.tiles + index);
        for (int i = 0; i < kCount; ++i) {
            if (has_others(index + i)) {
                restore_outputs(scratch_.tiles[index + i], mask_of(parts[i]), scratch_.before[i], head_dim_);
            }
        }
    }

    static __mmask16 mask_of(const Part& part) { return static_cast<__mmask16>((1u << part.end) - (1u << part.begin)); }

    // Whether lanes at rest hold queries: what the others hold is nobody's.
    bool has_others(int tile) const { return parts_[tile].end - parts_[tile].begin < this->num_lanes(tile); }

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
        const Visible visible(tile, mask_of(part), from, to);
        mask_scores(scores, visible, first_key, 0, seen_first);
        mask_scores(scores, visible, first_key, seen_last, num_rows);
        weigh(tile, scores, num_rows, mask_of(part), scale_factor(), head_dim_, scratch_.weights[place]);
    }

    // Where the keys of a chunk lie, sixteen at a time: in the cache itself, or copied where it is cut otherwise.
    HEADRACE_AVX512 void find_keys(const std::int32_t* table, int chunk, int end) {
        const int num_tiles = (end - chunk + 15) / 16;
        if (call_.block_bits >= 4 && head_dim_ % 32 == 0) {
            key_stride_ = call_.token_stride;
            for (int i = 0; i < num_tiles; ++i) {
                key_rows_[i] = key_row(table, chunk + i * 16);
            }
            return;
        }
        const int padded = (head_dim_ + 31) / 32 * 32;
        key_stride_ = padded;
        for (int key = chunk; key < end; ++key) {
            bf16* copy = scratch_.keys + (key - chunk) * padded;
            std::memcpy(copy, key_row(table, key), head_dim_ * sizeof(bf16));
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
                rows[i] = from <= key && key < end ? value_row(table, key) : kZeros<bf16>;
            }
            Products::pack(rows, step - chunk, head_dim_, scratch_.values);
        }
    }

    Scratch& scratch_;
    const bf16* key_rows_[kChunk / 16];
    std::int64_t key_stride_ = 0;
};

}  // namespace attention
#endif

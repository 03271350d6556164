// Attention of new tokens over their sequences' keys and values in the paged cache; float32, varlen, causal.
//
// The walk over the tree of block tables is that of attention.cpp: keys that several sequences share are read once for
// all their queries.

#include "attention_walk.h"
#include "float32_attention.h"

#ifdef HEADRACE_X86
namespace float32 {

using attention::Call;
using attention::kMaxTiles;
using attention::Part;
using attention::Plan;

// A thread's own memory, kept between calls.
struct Scratch {
    Tile tiles[kMaxTiles];
    float queries[kMaxTiles][kMaxHeadDim * kLanes];
    float scores[kChunk * kLanes];

    static Scratch& of_this_thread() {
        static thread_local attention::Buffer<Scratch> scratch = attention::make_buffer<Scratch>(1);
        return *scratch;
    }
};

class Item : public attention::Walk<Item, float> {
    friend attention::Walk<Item, float>;

public:
    Item(const Call& call, const Plan& plan, int index)
        : Walk(call, plan, index, Scratch::of_this_thread().tiles), scratch_(Scratch::of_this_thread()) {}

    static void begin_thread() {}

    static void end_thread() {}

private:
    void pack_queries(int tile, const float* const (&rows)[kLanes]) {
        float* packed = scratch_.queries[tile];
        std::memset(packed, 0, sizeof(float) * kLanes * head_dim_);
        for (int lane = 0; lane < num_lanes(tile); ++lane) {
            for (int dim = 0; dim < head_dim_; ++dim) {
                packed[dim * kLanes + lane] = rows[lane][dim];
            }
        }
    }

    void merge(Tile& tile, const Tile& other) const { float32::merge(tile, other, scale_factor(), head_dim_); }

    void write_tile(const Tile& tile, float* const (&rows)[kLanes]) const {
        for (int lane = 0; lane < kLanes && rows[lane] != nullptr; ++lane) {
            const float inverse = 1.0f / tile.sum[lane];
            for (int dim = 0; dim < head_dim_; ++dim) {
                rows[lane][dim] = tile.output[dim][lane] * inverse;
            }
        }
    }

    void attend_tiles(const std::int32_t* table, int begin, int end, int from, int to) {
        for (int chunk = from; chunk < to; chunk += kChunk) {
            const int num_keys = std::min(kChunk, to - chunk), num_rows = (num_keys + kStep - 1) / kStep * kStep;
            for (int i = 0; i < num_rows; ++i) {
                keys_[i] = i < num_keys ? key_row(table, chunk + i) : attention::kZeros<float>;
                values_[i] = i < num_keys ? value_row(table, chunk + i) : attention::kZeros<float>;
            }
            for (int tile = begin; tile < end; ++tile) {
                attend_chunk(tile, chunk, num_keys, num_rows);
            }
        }
    }

    // A tile's queries at work and a chunk's keys, of which the first is `first_key`.
    void attend_chunk(int index, int first_key, int num_keys, int num_rows) {
        const Part& part = parts_[index];
        if (part.first >= first_key + num_keys || part.last <= first_key) {
            return;
        }
        Tile& tile = tiles_[index];
        const Lanes lanes = {part.begin, part.end};
        const int count = lanes.end - lanes.begin;
        float* scores = scratch_.scores;
        if (count <= kMaxFew) {
            kScoreFew[count](keys_, values_, num_rows, query_rows_[index], lanes.begin, head_dim_, scores);
        } else {
            score(keys_, num_rows, scratch_.queries[index], head_dim_, lanes, scores);
        }
        if (std::isfinite(call_.soft_cap)) {
            float32::cap_scores(scores, num_rows, call_.scale, call_.soft_cap);
        }
        if (part.all_first > first_key || part.all_last < first_key + num_rows) {
            float32::mask_scores(scores, tile, first_key, num_rows);
        }
        for (int row = num_keys; row < num_rows; ++row) {
            std::fill_n(scores + row * kLanes, kLanes, -INFINITY);
        }
        float32::weigh(tile, scores, num_rows, lanes, scale_factor(), head_dim_);
        if (count <= kMaxFew) {
            kAddValuesFew[count](values_, num_rows, scores, lanes.begin, head_dim_, tile);
        } else {
            add_values(values_, num_rows, scores, head_dim_, lanes, tile);
        }
    }

    Scratch& scratch_;
    const float* keys_[kChunk];
    const float* values_[kChunk];
};

}  // namespace float32

// As `headrace_paged_attention`, all tensors of float32.
HEADRACE_API void headrace_float32_paged_attention(const attention::Call* call) {
    attention::run<float32::Item>(*call);
}
#endif

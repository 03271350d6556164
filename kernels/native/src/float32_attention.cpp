// Attention of new tokens over their sequences' keys and values in the paged cache; float32, varlen, causal.
//
// The walk over the tree of block tables is that of attention.cpp: keys that several sequences share are read once for
// all their queries.

#include "attention_few_walk.h"
#include "float32_attention_few_avx2.h"
#include "float32_attention_few_avx512.h"

#ifdef HEADRACE_X86
namespace float32 {

using attention::Call;
using attention::FewWalk;
using attention::kMaxTiles;
using attention::Part;
using attention::Plan;

// A thread's own memory, kept between calls.
struct Scratch {
    Tile tiles[kMaxTiles];
    float queries[kMaxTiles][kMaxHeadDim * kLanes];
    float scores[Avx512::kTiles][kChunk * kLanes];
    FewResult few[kMaxTiles * kLanes];

    static Scratch& of_this_thread() {
        static thread_local attention::Buffer<Scratch> scratch = attention::make_buffer<Scratch>(1);
        return *scratch;
    }
};

// What an item does with the keys that its queries see, by the instructions that `Isa` and, for few queries, `IsaOfFew`
// use.
template <class Isa, class IsaOfFew>
class Item : public FewWalk<Item<Isa, IsaOfFew>, float> {
    using Base = FewWalk<Item, float>;
    using Base::call_, Base::head_dim_, Base::tiles_, Base::query_rows_, Base::parts_;
    using Base::scale_factor, Base::key_row, Base::value_row;

public:
    Item(const Call& call, const Plan& plan, int index)
        : Base(call, plan, index, Scratch::of_this_thread().tiles, Scratch::of_this_thread().few) {}

    static void begin_thread() {}

    static void end_thread() {}

    void pack_queries(int tile, const float* const (&rows)[kLanes]) {
        float* packed = scratch_.queries[tile];
        std::memset(packed, 0, sizeof(float) * kLanes * head_dim_);
        for (int lane = 0; lane < this->num_lanes(tile); ++lane) {
            for (int dim = 0; dim < head_dim_; ++dim) {
                packed[dim * kLanes + lane] = rows[lane][dim];
            }
        }
    }

    void merge(Tile& tile, const Tile& other) const { Isa::merge(tile, other, scale_factor(), head_dim_); }

    void write_tile(const Tile& tile, float* const (&rows)[kLanes]) const {
        for (int lane = 0; lane < kLanes && rows[lane] != nullptr; ++lane) {
            const float inverse = 1.0f / tile.sum[lane];
            for (int dim = 0; dim < head_dim_; ++dim) {
                rows[lane][dim] = tile.output[dim][lane] * inverse;
            }
        }
    }

    static void attend_few(int count, const Few<float>& few, FewResult* results) {
        // By the number of queries.
        static constexpr void (*kAttend[kMaxFew + 1])(const Few<float>&, FewResult*) = {
            nullptr, attend_few<1>, attend_few<2>, attend_few<3>, attend_few<4>,
            attend_few<5>, attend_few<6>, attend_few<7>, attend_few<8>,
        };
        kAttend[count](few, results);
    }

    void add_few(Tile& tile, std::uint16_t lanes, const FewResult* results) const {
        IsaOfFew::add(tile, lanes, results, scale_factor(), head_dim_);
    }

    void attend_tiles(const std::int32_t* table, int begin, int end, int from, int to) {
        for (int chunk = from; chunk < to; chunk += kChunk) {
            const int num_keys = std::min(kChunk, to - chunk);
            const int num_rows = (num_keys + Isa::kStep - 1) / Isa::kStep * Isa::kStep;
            for (int i = 0; i < num_rows; ++i) {
                keys_[i] = i < num_keys ? key_row(table, chunk + i) : attention::kZeros<float>;
                values_[i] = i < num_keys ? value_row(table, chunk + i) : attention::kZeros<float>;
            }
            const Rows rows = {keys_, values_, num_rows, head_dim_};
            for (int tile = begin; tile < end;) {
                if (!sees(tile, chunk, num_keys)) {
                    ++tile;
                } else if (Isa::kTiles == 1 || tile + 1 == end || !sees(tile + 1, chunk, num_keys)) {
                    attend_chunk<1>(rows, tile, chunk, num_keys);
                    ++tile;
                } else {
                    attend_chunk<Isa::kTiles>(rows, tile, chunk, num_keys);
                    tile += Isa::kTiles;
                }
            }
        }
    }

private:
    // Leaves a result for each of `kCount` queries.
    template <int kCount>
    static void attend_few(const Few<float>& few, FewResult* results) {
        alignas(64) float scores[kMaxFew][kFewChunk];
        for (int query = 0; query < kCount; ++query) {
            results[query].maximum = attention::kNoScore;
            results[query].sum = 0;
            std::memset(results[query].output, 0, (few.head_dim + 15) / 16 * 16 * sizeof(float));
        }
        const int to = few.span.to;
        for (int first = few.span.from; first < to; first += kFewChunk) {
            const int end = std::min(first + kFewChunk, to), count = (end - first + 15) / 16 * 16;
            IsaOfFew::template few_scores<kCount>(few, first, end, scores);
            for (int query = 0; query < kCount; ++query) {
                if (std::isfinite(few.soft_cap)) {
                    Isa::cap_scores(scores[query], count / kLanes, few.scale, few.soft_cap);
                }
                std::fill(scores[query] + end - first, scores[query] + count, -INFINITY);
                IsaOfFew::few_weights(scores[query], count, few.factor, few.head_dim, results[query]);
            }
            IsaOfFew::template few_outputs<kCount>(few, first, end, scores, results);
        }
    }

    // Whether a tile's queries at work see any of a chunk's keys, of which the first is `first_key`.
    bool sees(int tile, int first_key, int num_keys) const {
        return parts_[tile].first < first_key + num_keys && parts_[tile].last > first_key;
    }

    // The queries at work of `kCount` tiles from `index` on.
    template <int kCount>
    void attend_chunk(const Rows& rows, int index, int first_key, int num_keys) {
        Lanes lanes[kCount];
        for (int i = 0; i < kCount; ++i) {
            lanes[i] = {parts_[index + i].begin, parts_[index + i].end};
        }
        Isa::template score<kCount>(rows, scratch_.queries[index], query_rows_ + index, lanes, scratch_.scores[0]);
        for (int i = 0; i < kCount; ++i) {
            weigh(index + i, lanes[i], first_key, num_keys, rows.count, scratch_.scores[i]);
        }
        Isa::template add_values<kCount>(rows, scratch_.scores[0], lanes, tiles_ + index);
    }

    // From a tile's scores to its weights.
    void weigh(int index, Lanes lanes, int first_key, int num_keys, int num_rows, float* scores) {
        const Part& part = parts_[index];
        if (std::isfinite(call_.soft_cap)) {
            Isa::cap_scores(scores, num_rows, call_.scale, call_.soft_cap);
        }
        if (part.all_first > first_key || part.all_last < first_key + num_rows) {
            Isa::mask_scores(scores, tiles_[index], first_key, num_rows);
        }
        for (int row = num_keys; row < num_rows; ++row) {
            std::fill_n(scores + row * kLanes, kLanes, -INFINITY);
        }
        Isa::weigh(tiles_[index], scores, num_rows, lanes, scale_factor(), head_dim_);
    }

    Scratch& scratch_ = Scratch::of_this_thread();
    const float* keys_[kChunk];
    const float* values_[kChunk];
};

}  // namespace float32

// As `headrace_attention`, all tensors of float32.
HEADRACE_API void headrace_float32_attention(const attention::Call* call) {
    if (call->uses_avx512) {
        attention::run<float32::Item<float32::Avx512, float32::FewAvx512>>(*call);
    } else {
        attention::run<float32::Item<float32::Avx2, float32::FewAvx2>>(*call);
    }
}
#endif

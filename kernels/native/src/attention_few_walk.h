// A walk that takes a lone token's queries over the keys it shares with nobody by a way of their own.
#pragma once

#include "attention_few_call.h"
#include "attention_walk.h"

#ifdef HEADRACE_X86
namespace attention {

// Besides what `Walk` asks of it, `Item` has:
//     attend_few(count, few, results)          leaves a result for each of so many queries
//     add_few(tile, lanes, results)            adds them to a tile, those in `lanes` at each lane's place
template <class Item, class Element>
class FewWalk : public Walk<Item, Element> {
    using Base = Walk<Item, Element>;
    friend Base;

protected:
    using Base::call_, Base::plan_, Base::head_dim_, Base::kv_head_, Base::num_tiles_, Base::first_lane_;
    using Base::end_lane_, Base::end_sequence_, Base::split_first_, Base::split_last_, Base::query_rows_, Base::tiles_;
    using Base::scale_factor;

public:
    // `results`: one for each lane of the tiles, to work in.
    FewWalk(const Call& call, const Plan& plan, int index, Tile* tiles, FewResult* results)
        : Base(call, plan, index, tiles), results_(results) {}

    void attend(int split) {
        Base::attend(split);
        for (int i = 0; i < num_tiles_; ++i) {
            if (few_lanes_[i]) {
                static_cast<Item&>(*this).add_few(tiles_[i], few_lanes_[i], results_ + i * kLanes);
            }
        }
    }

private:
    void attend_own_keys(int sequence, int from) {
        const int index = call_.order[sequence], length = call_.query_starts[index + 1] - call_.query_starts[index];
        const int begin = std::max(plan_.lane_starts[sequence], first_lane_) - first_lane_;
        const int count = std::min(plan_.lane_starts[sequence + 1], end_lane_) - first_lane_ - begin;
        if (length > 1 || count > kMaxFew) {
            Base::attend_own_keys(sequence, from);
            return;
        }
        const Tile& first_tile = tiles_[begin / kLanes];
        const int lane = begin % kLanes;
        Few<Element> few = {};
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
            const int place = begin + i;
            few.queries[i] = query_rows_[place / kLanes][place % kLanes];
            few_lanes_[place / kLanes] |= 1u << place % kLanes;
        }
        static_cast<Item&>(*this).attend_few(count, few, results_ + begin);
    }

    Span<Element> span_of(int index, int from, int to) const {
        return {rows_of(call_.key_cache, index), rows_of(call_.value_cache, index), from, to};
    }

    Rows<Element> rows_of(const bf16* cache, int index) const {
        return {reinterpret_cast<const Element*>(cache) + kv_head_ * call_.head_stride,
                call_.block_tables + index * call_.max_blocks, call_.block_bits, call_.block_stride,
                call_.token_stride};
    }

    FewResult* results_;
    std::uint16_t few_lanes_[kMaxTiles] = {};  // of each tile, those that attend_few has results of
};

}  // namespace attention
#endif

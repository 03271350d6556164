// What one token's queries over keys that no other sequence shares are asked, and what they leave.
#pragma once

#include "attention_tile.h"

#ifdef HEADRACE_X86
namespace attention {

constexpr int kMaxFew = 8;  // queries
// How many keys ahead of those at work are fetched into the second-level cache: blocks lie anywhere, so the processor
// cannot guess which are next.
constexpr int kKeysAhead = 128;

// Where one KV head's keys (or values) lie, 2^block_bits tokens a block.
template <class Element>
struct Rows {
    const Element* cache;  // at the head
    const std::int32_t* table;
    std::int64_t block_bits, block_stride, token_stride;

    const Element* operator[](int key) const {
        const int offset = key & ((1 << block_bits) - 1);
        return cache + table[key >> block_bits] * block_stride + offset * token_stride;
    }
};

// Keys and values from `from` to before `to`.
template <class Element>
struct Span {
    Rows<Element> keys, values;
    int from, to;
};

// What some queries attend to, and what will be attended to after that.
template <class Element>
struct Few {
    const Element* queries[kMaxFew];
    Span<Element> span, next;
    int head_dim;
    float scale, soft_cap, factor;
};

// A query's maximum of the raw scores, sum of the weights, and weighted values, not yet divided by the sum.
struct alignas(64) FewResult {
    float output[kMaxHeadDim];
    float maximum;
    float sum;
};

template <class Element>
inline void fetch(const Span<Element>& span, int first, int head_dim) {
    constexpr int kElementsPerLine = 64 / sizeof(Element);
    const int end = first + 16 < span.to ? first + 16 : span.to;
    for (int key = first; key < end; ++key) {
        const Element *keys = span.keys[key], *values = span.values[key];
        for (int dim = 0; dim < head_dim; dim += kElementsPerLine) {
            _mm_prefetch(keys + dim, _MM_HINT_T1);
            _mm_prefetch(values + dim, _MM_HINT_T1);
        }
    }
}

// The sixteen keys and values that are `kKeysAhead` ahead of `key`, or as far into what comes next as `key` is here.
template <class Element>
inline void fetch_ahead(const Few<Element>& few, int key) {
    if (key + kKeysAhead < few.span.to) {
        fetch(few.span, key + kKeysAhead, few.head_dim);
    } else {
        const int left = few.span.to - few.span.from, window = left < kKeysAhead ? left : kKeysAhead;
        fetch(few.next, few.next.from + key - (few.span.to - window), few.head_dim);
    }
}

}  // namespace attention
#endif

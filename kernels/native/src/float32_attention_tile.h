// What attention in float32 holds of a tile of sixteen queries, whatever computes it.
//
// As in attention_tile.h, scores and outputs are kept transposed: a row is a key (or a dimension of the head), and its
// sixteen lanes are the queries. Keys and values are read where they lie, one pointer each.
#pragma once

#include "attention_tile.h"

#ifdef HEADRACE_X86
namespace float32 {

using attention::kLanes;
using attention::kLog2E;
using attention::kMaxHeadDim;
using attention::Tile;

constexpr int kChunk = 64;  // keys that scores are held of at a time
constexpr int kFewChunk = attention::kChunk;  // the same of a lone token's few queries

// The queries of a tile at work: those from lane `begin` to before `end`.
struct Lanes {
    int begin, end;
};

// Some keys and their values, one pointer each.
struct Rows {
    const float* const* keys;
    const float* const* values;
    int count, head_dim;
};

}  // namespace float32
#endif

// A block of 32 rows by 32 columns of an int8 product, with AMX and, where it is missing or not worth it, with VNNI.
//
// Both read tiles of 1 KiB. Left: sixteen rows of 64 bytes. Right: sixteen columns, four of their 64 bytes after another
// (the bytes 0 to 3 of every column, then 4 to 7, …). The tiles that follow along the inputs follow in memory.
#pragma once

#include "int8_rows.h"

#ifdef HEADRACE_X86
#define HEADRACE_AMX_INT8 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,amx-tile,amx-int8")))

namespace int8 {

// Sums of a block on their way out: output = sum * row scale * column scale + bias.
template <typename Element>
struct Pending {
    const std::int32_t* sums = nullptr;  // [32, 32], aligned
    const float* row_scales = nullptr;
    const float* column_scales = nullptr;
    const float* biases = nullptr;
    Element* output = nullptr;
    std::int64_t output_stride = 0;
    int num_rows = 0;
    int num_columns = 0;
    int done = 0;
};

HEADRACE_INLINE void store_row(bf16* output, __m512 left, __m512 right, __mmask32 mask) {
    _mm512_mask_storeu_epi16(output, mask, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right, left)));
}

HEADRACE_INLINE void store_row(float* output, __m512 left, __m512 right, __mmask32 mask) {
    _mm512_mask_storeu_ps(output, static_cast<__mmask16>(mask), left);
    _mm512_mask_storeu_ps(output + 16, static_cast<__mmask16>(mask >> 16), right);
}

HEADRACE_INLINE __m512 scaled(const std::int32_t* sums, const float* column_scales, const float* biases,
                              __m512 row_scale) {
    const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums)), row_scale);
    return _mm512_fmadd_ps(product, _mm512_loadu_ps(column_scales), _mm512_loadu_ps(biases));
}

// Finishes up to `count` more rows.
template <typename Element>
HEADRACE_INLINE void finish(Pending<Element>& block, int count) {
    const __mmask32 mask = block.num_columns >= kBlock ? ~0u : (1u << block.num_columns) - 1;
    const int end = block.done + count < block.num_rows ? block.done + count : block.num_rows;
    for (int row = block.done; row < end; ++row) {
        const std::int32_t* sums = block.sums + row * kBlock;
        const __m512 scale = _mm512_set1_ps(block.row_scales[row]);
        const __m512 left = scaled(sums, block.column_scales, block.biases, scale);
        const __m512 right = scaled(sums + 16, block.column_scales + 16, block.biases + 16, scale);
        store_row(block.output + row * block.output_stride, left, right, mask);
    }
    block.done = end;
}

struct Amx {
    static constexpr int kFlipped = 0;

    struct alignas(64) TileConfig {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };

    HEADRACE_AMX_INT8 static void begin() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }

    HEADRACE_AMX_INT8 static void end() { _tile_release(); }

    // sums = left . right. The rows of `pending` are finished between the tiles' products, which leave the vector
    // units idle. All 32 rows are computed, since that takes no longer than one.
    template <typename Element>
    HEADRACE_AMX_INT8 static void multiply(const std::uint8_t* left, const std::uint8_t* right, std::int64_t num_steps,
                                           int, const std::int32_t*, std::int32_t* sums, Pending<Element>& pending) {
        const std::int64_t next = num_steps * kTile;
        const int rows_per_step = static_cast<int>((kBlock + num_steps - 1) / num_steps);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (std::int64_t offset = 0; offset < next; offset += kTile) {
            _tile_loadd(4, left + offset, kStep);
            _tile_loadd(6, right + offset, kStep);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, right + next + offset, kStep);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(5, left + next + offset, kStep);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
            finish(pending, rows_per_step);
        }
        _tile_stored(0, sums, kBlock * 4);
        _tile_stored(1, sums + 16, kBlock * 4);
        _tile_stored(2, sums + 16 * kBlock, kBlock * 4);
        _tile_stored(3, sums + 16 * kBlock + 16, kBlock * 4);
    }
};

// Multiplies unsigned by signed bytes: the left side is 128 too great, and each column's sums start as much too low.
// kTogether: rows that share the reading of the right side.
template <int kTogether>
struct Vnni {
    static constexpr int kFlipped = 0x80;

    HEADRACE_AVX512 static void begin() {}

    HEADRACE_AVX512 static void end() {}

    template <typename Element>
    HEADRACE_AVX512 static void multiply(const std::uint8_t* left, const std::uint8_t* right, std::int64_t num_steps,
                                         int num_rows, const std::int32_t* starts, std::int32_t* sums,
                                         Pending<Element>& pending) {
        finish(pending, kBlock);
        for (int row = 0; row < num_rows; row += kTogether) {
            const std::uint8_t* rows = left + row / kRows * num_steps * kTile + row % kRows * kStep;
            const auto multiply = row == 0 ? multiply_rows<true> : multiply_rows<false>;
            multiply(rows, right, num_steps, starts, sums + row * kBlock);
        }
    }

    // kFetches: the block of the right side that comes after this one is fetched into the second-level cache.
    template <bool kFetches>
    HEADRACE_AVX512 static void multiply_rows(const std::uint8_t* rows, const std::uint8_t* right,
                                              std::int64_t num_steps, const std::int32_t* starts,
                                              std::int32_t* sums) {
        // Unrolled early, or the compiler keeps the totals in memory and stores each one after each product.
        __m512i totals[kTogether][2];
#pragma GCC unroll 8
        for (int row = 0; row < kTogether; ++row) {
            totals[row][0] = _mm512_loadu_si512(starts);
            totals[row][1] = _mm512_loadu_si512(starts + 16);
        }
        const std::int64_t next = num_steps * kTile;
        for (std::int64_t offset = 0; offset < next; offset += kTile) {
            for (int four = 0; four < kStep; four += 4) {
                const std::uint8_t* columns = right + offset + four * 16;
                if (kFetches) {
                    _mm_prefetch(columns + 2 * next, _MM_HINT_T1);
                    _mm_prefetch(columns + 3 * next, _MM_HINT_T1);
                }
                const __m512i first = _mm512_load_si512(columns);
                const __m512i second = _mm512_load_si512(columns + next);
#pragma GCC unroll 8
                for (int row = 0; row < kTogether; ++row) {
                    std::int32_t bytes;
                    std::memcpy(&bytes, rows + offset + row * kStep + four, sizeof bytes);
                    const __m512i broadcast = _mm512_set1_epi32(bytes);
                    totals[row][0] = _mm512_dpbusd_epi32(totals[row][0], broadcast, first);
                    totals[row][1] = _mm512_dpbusd_epi32(totals[row][1], broadcast, second);
                }
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < kTogether; ++row) {
            _mm512_store_si512(sums + row * kBlock, totals[row][0]);
            _mm512_store_si512(sums + row * kBlock + 16, totals[row][1]);
        }
    }
};

}  // namespace int8
#endif

// x @ weightᵀ for few rows of x: the weight is read from memory once, as it lies there, and all else hides behind that.
//
// AMX wants one side of a product as pairs of elements in columns. The weight's own rows are the side that needs no such
// order, so it is x, the smaller, that is brought into it, and the product comes out transposed.

#include "attention_amx.h"
#include "transpose.h"

#ifdef HEADRACE_X86
namespace {

constexpr int kTile = 16;    // rows of x, or of the weight, in a tile
constexpr int kDepth = 32;   // elements of each that one instruction multiplies
constexpr int kBlock = 32;   // rows of the weight that are multiplied at a time

// Sixteen rows of x as tiles [depth / 2, rows, 2], those it lacks as zeros.
HEADRACE_AVX512 void pack_rows(const bf16* x, std::int64_t stride, std::int64_t num_rows, std::int64_t depth,
                               bf16* packed) {
    for (std::int64_t k = 0; k < depth; k += kDepth) {
        __m512i rows[16];
        for (int i = 0; i < kTile; ++i) {
            rows[i] = i < num_rows ? _mm512_loadu_si512(x + i * stride + k) : _mm512_setzero_si512();
        }
        transpose(rows);
        for (int i = 0; i < kTile; ++i) {
            _mm512_store_si512(packed + (k + 2 * i) * kTile, rows[i]);
        }
    }
}

// Stores 32 outputs of each of `num_rows` rows of x. sums: two tiles, a row for each output.
HEADRACE_AVX512 void store_block(const float (*sums)[kTile * kTile], const bf16* bias, bf16* output,
                                 std::int64_t output_stride, std::int64_t num_rows) {
    // Puts a row's elements and those of the next beside each other.
    alignas(64) static const std::uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                              21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                              11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i interleave = _mm512_load_si512(kInterleave);
    __m512i pairs[16];
    for (int i = 0; i < 16; ++i) {
        const float* pair = sums[i / 8] + (i % 8) * 2 * kTile;
        __m512 first = _mm512_load_ps(pair), second = _mm512_load_ps(pair + kTile);
        if (bias != nullptr) {
            const __m512 wide = load(bias + 2 * i, 3);
            first = _mm512_add_ps(first, _mm512_broadcastss_ps(_mm512_castps512_ps128(wide)));
            const __m512 next = _mm512_permutexvar_ps(_mm512_set1_epi32(1), wide);
            second = _mm512_add_ps(second, next);
        }
        const auto narrowed = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
        pairs[i] = _mm512_permutexvar_epi16(interleave, narrowed);
    }
    transpose(pairs);
    for (int i = 0; i < kTile && i < num_rows; ++i) {
        _mm512_storeu_si512(output + i * output_stride, pairs[i]);
    }
}

// 32 outputs of up to 16 rows of x or, if kTwo, of up to 32. Where there is a `next`, the 32 rows of weight that come
// after these are fetched into the second-level cache meanwhile.
template <bool kTwo>
HEADRACE_AMX void multiply_block(const bf16* weight, const bf16* packed, std::int64_t depth, const bf16* bias,
                                 bf16* output, std::int64_t output_stride, std::int64_t num_rows, const bf16* next) {
    alignas(64) float sums[4][kTile * kTile];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const std::int64_t row_bytes = depth * sizeof(bf16);
    const bf16* second = packed + kTile * depth;
    for (std::int64_t k = 0; k < depth; k += kDepth) {
        _tile_loadd(4, weight + k, row_bytes);
        _tile_loadd(5, weight + kTile * depth + k, row_bytes);
        _tile_loadd(6, packed + k * kTile, 64);
        for (int i = 0; next != nullptr && i < kBlock; ++i) {
            _mm_prefetch(next + (k + i) * kBlock, _MM_HINT_T1);
        }
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (kTwo) {
            _tile_loadd(7, second + k * kTile, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    store_block(sums, bias, output, output_stride, num_rows);
    if (kTwo) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        store_block(sums + 2, bias, output + kTile * output_stride, output_stride, num_rows - kTile);
    }
}

}  // namespace

// output = x @ weightᵀ + bias. Rows of x `stride` elements apart; weight [num_outputs, depth] and output dense; both
// sizes multiples of 32; bias may be null. packed: room for x with its rows rounded up to a multiple of 16, aligned to
// 64 bytes.
HEADRACE_API HEADRACE_AMX void headrace_linear(const bf16* x, std::int64_t stride, const bf16* weight, const bf16* bias,
                                               bf16* packed, bf16* output, std::int64_t num_rows,
                                               std::int64_t num_outputs, std::int64_t depth) {
    const std::int64_t num_tiles = (num_rows + kTile - 1) / kTile;
#pragma omp parallel
    {
        attention::Amx::begin();
#pragma omp for schedule(static)
        for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
            const std::int64_t row = tile * kTile;
            pack_rows(x + row * stride, stride, num_rows - row, depth, packed + row * depth);
        }
#pragma omp for schedule(static)
        for (std::int64_t n = 0; n < num_outputs; n += kBlock) {
            const bf16* rows = weight + n * depth;
            const bf16* next = n + kBlock < num_outputs ? rows + kBlock * depth : nullptr;
            for (std::int64_t row = 0; row < num_rows; row += 2 * kTile) {
                const auto multiply = row + kTile < num_rows ? multiply_block<true> : multiply_block<false>;
                multiply(rows, packed + row * depth, depth, bias == nullptr ? nullptr : bias + n,
                         output + row * num_outputs + n, num_outputs, num_rows - row, row == 0 ? next : nullptr);
            }
        }
        attention::Amx::end();
    }
}
#endif

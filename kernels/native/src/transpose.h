// A 16 by 16 matrix of 32-bit values (or pairs of bfloat16), turned over in registers.
#pragma once

#include "common.h"

#ifdef HEADRACE_X86

HEADRACE_INLINE __m512i lanes_02(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); }

HEADRACE_INLINE __m512i lanes_13(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }

// rows[i] element j becomes rows[j] element i.
HEADRACE_INLINE void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], quads[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Each 128-bit lane L of quads[i + c] now holds column 4L + c of the rows i to i + 3.
    for (int i = 0; i < 16; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        const __m512i even_upper = lanes_02(quads[c], quads[c + 4]), odd_upper = lanes_13(quads[c], quads[c + 4]);
        const __m512i even_lower = lanes_02(quads[c + 8], quads[c + 12]);
        const __m512i odd_lower = lanes_13(quads[c + 8], quads[c + 12]);
        rows[c] = lanes_02(even_upper, even_lower);
        rows[c + 4] = lanes_02(odd_upper, odd_lower);
        rows[c + 8] = lanes_13(even_upper, even_lower);
        rows[c + 12] = lanes_13(odd_upper, odd_lower);
    }
}

// Which 16-bit words of two registers to take so that they lie side by side: sixteen of each, from `first` on.
HEADRACE_INLINE __m512i words_side_by_side(int first) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // Of each pair the lower word is one of the first register's, the upper one is the other's, numbered from 32 on.
    const __m512i pairs = _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001));
    return _mm512_add_epi16(pairs, _mm512_set1_epi32((first + 32) << 16 | first));
}

#endif

// Quantized panels back to the kBf16 form, in registers or in cache.
#pragma once
#include "gemm.h"

namespace ns {

// Lanes of a decoded pair: column c's weights for k and k+1 side by side, eight columns to a register.
inline __m512i low_columns() { return _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0); }
inline __m512i high_columns() { return _mm512_add_epi32(low_columns(), _mm512_set1_epi32(8)); }

inline __m512bh round_pairs(__m512 low, __m512 high) { return _mm512_cvtne2ps_pbh(high, low); }
inline void store_pairs(bf16* target, __m512bh pairs) { _mm512_storeu_si512(target, reinterpret_cast<__m512i>(pairs)); }

// Sixteen columns of one kQ4 group: 16 k at a time through `next`, which gives the weights of one pair of k.
// vpermps as a table of the 16 values does both the masking of a nibble and its conversion to float.
struct Q4Columns {
    __m512 d0, d1, m0, m1;
    __m512i q0, q1;
    void start(const uint8_t* group, int half) {
        const __m256i* scales = reinterpret_cast<const __m256i*>(group) + half;
        const __m512 d = load_half(scales), m = load_half(scales + 2);
        d0 = _mm512_permutexvar_ps(low_columns(), d), d1 = _mm512_permutexvar_ps(high_columns(), d);
        m0 = _mm512_permutexvar_ps(low_columns(), m), m1 = _mm512_permutexvar_ps(high_columns(), m);
    }
    void load(const uint8_t* group, int half, int k16) {
        const uint8_t* block = group + 128 + (k16 * 4 + half * 2) * 64;
        q0 = _mm512_loadu_si512(block), q1 = _mm512_loadu_si512(block + 64);
    }
    __m512bh next() {
        const __m512 values = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512 w0 = _mm512_fmadd_ps(_mm512_permutexvar_ps(q0, values), d0, m0);
        const __m512 w1 = _mm512_fmadd_ps(_mm512_permutexvar_ps(q1, values), d1, m1);
        q0 = _mm512_srli_epi32(q0, 4), q1 = _mm512_srli_epi32(q1, 4);
        return round_pairs(w0, w1);
    }
};

// Sixteen columns of one kQ8 group.
struct Q8Columns {
    __m512 d0, d1;
    const __m128i* q;
    void start(const uint8_t* group, int half) {
        const __m512 d = load_half(reinterpret_cast<const __m256i*>(group) + half);
        d0 = _mm512_permutexvar_ps(low_columns(), d), d1 = _mm512_permutexvar_ps(high_columns(), d);
    }
    void load(const uint8_t* group, int half, int k16) {
        q = reinterpret_cast<const __m128i*>(group + 64 + k16 * 512) + half * 2;
    }
    __m512bh next() {
        const __m512 w0 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q))), d0);
        const __m512 w1 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q + 1))), d1);
        q += 4;
        return round_pairs(w0, w1);
    }
};

// One group into `target`: 32 k of 32 columns.
template <class Columns>
inline void decode_group(bf16* target, const uint8_t* group) {
    for (int half = 0; half < 2; ++half) {
        Columns columns;
        columns.start(group, half);
        for (int k16 = 0; k16 < 2; ++k16) {
            columns.load(group, half, k16);
#pragma GCC unroll 8
            for (int pair = 0; pair < 8; ++pair)
                store_pairs(target + (k16 * 8 + pair) * 64 + half * 32, columns.next());
        }
    }
}

}  // namespace ns

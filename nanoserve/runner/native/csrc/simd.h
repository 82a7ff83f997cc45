// Vector arithmetic shared by all kernels: bf16 conversion and the few transcendental functions of a transformer.
//
// Every function works lane by lane and has one evaluation order, so a value never depends on its neighbours:
// that is what makes a row's logits the same alone and in a batch.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ns {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

using bf16 = uint16_t;

inline __m512 load_bf16(const bf16* source) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store_bf16(bf16* target, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}

inline __m512 load_half(const void* source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(source)));
}

// n, a multiple of 16, bf16 values as floats.
inline void widen(float* target, const bf16* source, int n) {
    for (int i = 0; i < n; i += 16) _mm512_storeu_ps(target + i, load_bf16(source + i));
}

inline __m512bh load_pairs(const void* source) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(source)); }

// Four neighbouring bytes, repeated in all sixteen lanes.
inline __m512i broadcast_four(const void* source) {
    int four;
    std::memcpy(&four, source, 4);
    return _mm512_set1_epi32(four);
}

// Two neighbouring bf16 values, the same way.
inline __m512bh broadcast_pair(const bf16* source) { return reinterpret_cast<__m512bh>(broadcast_four(source)); }

// Inlined by force: gcc takes it for a call that is seldom made where it depends on a condition, and a call in the midst
// of a product saves all registers.
inline __attribute__((always_inline)) void prefetch(const void* address) {
    _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0);
}

// 2^x for x <= 127; below -126 it is exactly 0, which masked scores rely on. Cephes exp2f polynomial, error 2 ulp.
inline __m512 exp2_ps(__m512 x) {
    const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);  // true for NaN: it must spread
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.535336188319500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.339887440266574e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618437357674640e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550332471162809e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402264791363012e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931472028550421e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_maskz_scalef_ps(alive, p, n);
}

// 2^x for x <= 0, which has no masks and no branches: 0 far below -126, NaN stays NaN. 2^frac by the polynomial of degree
// 4 with the least largest relative error on [0, 1], 2.6e-6 (Remez): bf16 rounds the result a thousand times coarser.
inline __m512 exp2_of_negative(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.353416792e-2f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.201146061e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.414427569e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.930038345e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.000002593f));
    return _mm512_scalef_ps(p, x);
}

// 2^(x - most) as bf16 for x <= most, a whole number: 0 from 2^-127 on, and for what is no number. In fixed point with 7
// bits behind the point, whose 128 powers are looked up: the input's rounding is an error of 0.27 % at the most, the
// mantissa's of 0.39 %. A third of the instructions of the polynomial, and on other ports than the products of attention.
class BinaryExponents {
 public:
    explicit BinaryExponents(float most) : most_(_mm512_set1_ps(most)) {}
    // The biased exponent and 7 bits behind it. (With `most` in the fused addend it would be wrong from 2^24 on.)
    __m512i of(__m512 x) const {
        const __m512 one = _mm512_set1_ps(128.f), bias = _mm512_set1_ps(127 * 128.f);
        return _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_sub_ps(x, most_), one, bias));
    }
    __m512i powers(__m512i first, __m512i second) const {
        const __m512i in_order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
        const __m512i words = _mm512_permutexvar_epi64(in_order, _mm512_packus_epi32(first, second));
        // The exponent stays, the lowest 7 bits become the mantissa.
        return _mm512_ternarylogic_epi32(words, mantissas(words), _mm512_set1_epi16(0x7f), 0xd8);
    }

 private:
    static __m512i mantissas(__m512i words);
    __m512 most_;
};

// 128 (2^(i/128) - 1), rounded.
alignas(64) inline constexpr uint8_t kMantissas[128] = {
    0, 1, 1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12, 13, 14, 15, 15,
    16, 17, 18, 19, 19, 20, 21, 22, 23, 23, 24, 25, 26, 27, 28, 28, 29, 30, 31, 32, 33, 34,
    34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54,
    55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 72, 73, 74, 75, 76, 77,
    78, 79, 80, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 96, 97, 98, 99, 100, 102, 103,
    104, 105, 107, 108, 109, 111, 112, 113, 115, 116, 117, 118, 120, 121, 123, 124, 125, 127};

inline __m512i BinaryExponents::mantissas(__m512i words) {
#ifdef __AVX512VBMI__
    return _mm512_permutex2var_epi8(_mm512_load_si512(kMantissas), words, _mm512_load_si512(kMantissas + 64));
#else
    alignas(64) uint16_t each[32];
    _mm512_store_si512(each, words);
    for (uint16_t& word : each) word = kMantissas[word & 127];
    return _mm512_load_si512(each);
#endif
}

// 1 / (1 + e^-x), also for large |x|.
inline __m512 sigmoid_ps(__m512 x) {
    const __m512 limited = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(-126.f));
    const __m512 e = exp2_ps(_mm512_min_ps(limited, _mm512_set1_ps(126.f)));
    return _mm512_div_ps(_mm512_set1_ps(1.f), _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

inline __m512 silu_ps(__m512 x) { return _mm512_mul_ps(x, sigmoid_ps(x)); }

// gelu's tanh form: x/2 (1 + tanh u) is x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
inline __m512 gelu_tanh_ps(__m512 x) {
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 u = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return _mm512_mul_ps(x, sigmoid_ps(_mm512_mul_ps(u, _mm512_set1_ps(1.5957691216f))));
}

}  // namespace ns

// Vector arithmetic shared by all kernels: bf16 conversion and the few transcendental functions of a transformer.
//
// Every function works lane by lane and has one evaluation order, so a value never depends on its neighbours:
// that is what makes a row's logits the same alone and in a batch.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ns {

using bf16 = uint16_t;

inline __m512 load_bf16(const bf16* source) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store_bf16(bf16* target, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}

inline __m512bh load_pairs(const void* source) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(source)); }

// Two neighbouring bf16 values, repeated in all sixteen lanes.
inline __m512bh broadcast_pair(const bf16* source) {
    int pair;
    std::memcpy(&pair, source, 4);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

inline void prefetch(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0); }
// For what is needed much later: past the first-level cache, from where it moves on to the shared one.
inline void prefetch_far(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T2); }

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

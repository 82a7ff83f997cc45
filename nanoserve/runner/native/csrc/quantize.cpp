#include "quantize.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace ns {
namespace {

constexpr float kMost = 127.f;
constexpr float kLeast = 1e-30f;  // a group of smaller values is 0: their reciprocals would overflow

constexpr int kTogether = 4;  // groups that are rounded together

// Writes the values of a mask side by side, and tells how many.
inline int append(float* target, __mmask16 which, __m512 values) {
    const int count = __builtin_popcount(which);
    _mm512_mask_storeu_ps(target, static_cast<__mmask16>((1u << count) - 1), _mm512_maskz_compress_ps(which, values));
    return count;
}

// Of each of four vectors the largest value.
inline __m128 largest_of_four(const __m512 (&v)[kTogether]) {
    __m256 half[kTogether];
    for (int i = 0; i < kTogether; ++i)
        half[i] = _mm256_max_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
    const __m256 low = _mm256_max_ps(_mm256_unpacklo_ps(half[0], half[1]), _mm256_unpackhi_ps(half[0], half[1]));
    const __m256 high = _mm256_max_ps(_mm256_unpacklo_ps(half[2], half[3]), _mm256_unpackhi_ps(half[2], half[3]));
    const __m256 lanes = _mm256_max_ps(_mm256_shuffle_ps(low, high, _MM_SHUFFLE(1, 0, 1, 0)),
                                       _mm256_shuffle_ps(low, high, _MM_SHUFFLE(3, 2, 3, 2)));
    return _mm_max_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
}

// Two groups' integers as bytes, in order.
inline __m512i to_bytes(const __m512i (&v)[4]) {
    const __m512i lanes = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
    return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), lanes);
}

// The sums of four groups of bytes, two in each vector.
inline __m128i sums_of_four(__m512i first, __m512i second) {
    const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
    const __m512i a = _mm512_dpbusd_epi32(zero, ones, first), b = _mm512_dpbusd_epi32(zero, ones, second);
    __m512i sum = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_CDAB));           // [a a b b] of each 16 bytes
    sum = _mm512_add_epi32(sum, _mm512_shuffle_i64x2(sum, sum, _MM_SHUFFLE(2, 3, 0, 1)));  // of each 32
    return _mm_blend_epi32(_mm512_castsi512_si128(sum), _mm512_extracti32x4_epi32(sum, 2), 0b1010);
}

struct Row {
    __m512 limit;  // beyond it a value is far
    bool broken;   // some value is no number
    float* list;
    int num_far;
};

// Rounds GROUPS groups from `x`.
template <int GROUPS>
inline void round_groups(const float* x, int8_t* q, GroupScale* scales, Row& row) {
    __m512 values[2 * kTogether] = {}, tops[kTogether] = {};
    __mmask16 is_far[2 * kTogether] = {};
    uint32_t any_far = 0;
#pragma GCC unroll 8
    for (int part = 0; part < 2 * GROUPS; ++part) {
        values[part] = _mm512_loadu_ps(x + part * 16);
        is_far[part] = _mm512_cmp_ps_mask(_mm512_abs_ps(values[part]), row.limit, _CMP_GT_OQ);
        any_far |= is_far[part];
    }
    __m128i far = _mm_setzero_si128(), first = _mm_set1_epi32(row.num_far);
    if (any_far) {
        alignas(16) uint32_t bits[kTogether] = {}, firsts[kTogether] = {};
        for (int part = 0; part < 2 * GROUPS; ++part) {
            if (part % 2 == 0) firsts[part / 2] = static_cast<uint32_t>(row.num_far);
            bits[part / 2] |= static_cast<uint32_t>(is_far[part]) << (part % 2 * 16);
            row.num_far += append(row.list + row.num_far, is_far[part], values[part]);
            values[part] = _mm512_maskz_mov_ps(static_cast<__mmask16>(~is_far[part]), values[part]);
        }
        far = _mm_load_si128(reinterpret_cast<const __m128i*>(bits));
        first = _mm_load_si128(reinterpret_cast<const __m128i*>(firsts));
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g)
        tops[g] = _mm512_max_ps(_mm512_abs_ps(values[2 * g]), _mm512_abs_ps(values[2 * g + 1]));
    const __m128 top = largest_of_four(tops), most = _mm_set1_ps(kMost);
    const __mmask8 alive = _mm_cmp_ps_mask(top, _mm_set1_ps(kLeast), _CMP_GT_OQ);
    const __m512 factors = _mm512_castps128_ps512(_mm_maskz_div_ps(alive, most, top));
    __m512i bytes[2];
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
        __m512i rounded[4];
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const __m512 factor = _mm512_permutexvar_ps(_mm512_set1_epi32(pair * 2 + part / 2), factors);
            rounded[part] = _mm512_cvtps_epi32(_mm512_mul_ps(values[pair * 4 + part], factor));
        }
        bytes[pair] = to_bytes(rounded);
        if (GROUPS >= 2 * pair + 2)
            _mm512_storeu_si512(q + pair * 64, bytes[pair]);
        else if (GROUPS == 2 * pair + 1)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + pair * 64), _mm512_castsi512_si256(bytes[pair]));
    }
    __m128 scale = _mm_maskz_div_ps(alive, top, most);
    if (row.broken)  // a maximum may pass over what is no number
        for (int part = 0; part < 2 * GROUPS; ++part)
            if (_mm512_cmp_ps_mask(values[part], values[part], _CMP_UNORD_Q))
                scale = _mm_mask_mov_ps(scale, static_cast<__mmask8>(1 << (part / 2)), _mm_set1_ps(kNotANumber));
    __m128 sum = _mm_mul_ps(scale, _mm_cvtepi32_ps(sums_of_four(bytes[0], bytes[1])));
    __m128 bits = _mm_castsi128_ps(far), firsts = _mm_castsi128_ps(first);
    _MM_TRANSPOSE4_PS(scale, sum, bits, firsts);
    _mm_storeu_ps(&scales[0].scale, scale);
    if (GROUPS > 1) _mm_storeu_ps(&scales[1].scale, sum);
    if (GROUPS > 2) _mm_storeu_ps(&scales[2].scale, bits);
    if (GROUPS > 3) _mm_storeu_ps(&scales[3].scale, firsts);
}

// The mean of the squares, in one fixed order.
float mean_square(const float* x, int k) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int i = 0; i < k; i += kGroup) {
        const __m512 low = _mm512_loadu_ps(x + i), high = _mm512_loadu_ps(x + i + 16);
        even = _mm512_fmadd_ps(low, low, even), odd = _mm512_fmadd_ps(high, high, odd);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(even, odd)) / static_cast<float>(k);
}

}  // namespace

void IntegerRows::write(int row, const float* x) const {
    int8_t* q = quants(row);
    GroupScale* scale = scales(row);
    const float mean = mean_square(x, k_);
    // Squares that underflow tell nothing: without a limit nothing is far.
    Row state{_mm512_set1_ps(mean < kLeast ? kInfinity : kFar * std::sqrt(mean)), std::isnan(mean), far(row), 1};
    state.list[0] = 0;
    int left = k_ / kGroup;
    for (; left >= 4; left -= 4, x += 4 * kGroup, q += 4 * kGroup, scale += 4) round_groups<4>(x, q, scale, state);
    if (left == 3) round_groups<3>(x, q, scale, state);
    if (left == 2) round_groups<2>(x, q, scale, state);
    if (left == 1) round_groups<1>(x, q, scale, state);
}

}  // namespace ns

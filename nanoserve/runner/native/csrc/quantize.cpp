#include "quantize.h"

#include <cmath>
#include <limits>

#include "simd.h"

namespace ns {
namespace {

// A value is far from this many root mean squares of its row on. On SmolLM2-135M 5 to 10 values in a hundred groups are,
// and the error of the logits is two thirds of what it is without.
constexpr float kFar = 7.f;
constexpr float kMost = 127.f;
constexpr float kLeast = 1e-30f;  // a group of smaller values is 0: their reciprocals would overflow

inline __m128i nearest(__m512 v, __m512 factor) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, factor)));
}

}  // namespace

void IntegerRows::write(int row, const float* x) const {
    int8_t* q = quants(row);
    float* apart = far(row);
    GroupScale* scale = scales(row);
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < k_; i += 16) {
        const __m512 part = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(k_);
    const __m512 limit = _mm512_set1_ps(kFar * std::sqrt(mean));
    for (int i = 0; i < k_; i += kGroup, ++scale) {
        __m512 low = _mm512_loadu_ps(x + i), high = _mm512_loadu_ps(x + i + 16);
        const __mmask16 low_far = _mm512_cmp_ps_mask(_mm512_abs_ps(low), limit, _CMP_GT_OQ);
        const __mmask16 high_far = _mm512_cmp_ps_mask(_mm512_abs_ps(high), limit, _CMP_GT_OQ);
        _mm512_storeu_ps(apart + i, _mm512_maskz_mov_ps(low_far, low));
        _mm512_storeu_ps(apart + i + 16, _mm512_maskz_mov_ps(high_far, high));
        low = _mm512_maskz_mov_ps(static_cast<__mmask16>(~low_far), low);
        high = _mm512_maskz_mov_ps(static_cast<__mmask16>(~high_far), high);
        const float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
        const __m512 factor = _mm512_set1_ps(top > kLeast ? kMost / top : 0.f);
        const __m256i bytes = _mm256_set_m128i(nearest(high, factor), nearest(low, factor));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), bytes);
        const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
        const int sum = _mm512_reduce_add_epi32(_mm512_zextsi256_si512(fours));
        scale->scale = top > kLeast ? top / kMost : 0.f;
        // A maximum may pass over what is no number.
        if (_mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q)) scale->scale = std::numeric_limits<float>::quiet_NaN();
        scale->sum = scale->scale * static_cast<float>(sum);
        scale->far = static_cast<uint32_t>(high_far) << 16 | low_far;
    }
}

}  // namespace ns

// RMSNorm.
#pragma once
#include <cmath>

#include "simd.h"

namespace ns {

// write(i, v / rms(v) * weight) for 16 values at a time, in fp32; lanes are summed in one fixed order.
template <class Write>
void rms_norm(const float* v, const float* weight, int n, float eps, Write write) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < n; i += 16) {
        const __m512 part = _mm512_loadu_ps(v + i);
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < n; i += 16)
        write(i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(v + i), scale), _mm512_loadu_ps(weight + i)));
}

}  // namespace ns

#include "kv.h"

namespace ns {
namespace {

constexpr float kLevels = 127.f;
constexpr float kLeast = 1.0e-30f;  // a smaller head is all zeros: its scale would have no reciprocal

inline __m512 finite_or_zero(__m512 x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(3.0e38f), _CMP_LE_OQ), x);
}

// Every second 16-bit place from the first (odd = 0) or the second on.
inline __mmask32 every_second(int odd) { return odd ? 0xaaaaaaaau : 0x55555555u; }

void write_bf16(const AttentionShape& shape, uint8_t* page, int slot, const float* key, const float* value) {
    const int head_dim = shape.head_dim;
    bf16* k = reinterpret_cast<bf16*>(page);
    bf16* v = k + shape.page_values() + slot / 2 * 2 * head_dim;
    alignas(64) bf16 rounded[kMaxHeadDim];
    for (int d = 0; d < head_dim; d += 16) store_bf16(rounded + d, _mm512_loadu_ps(key + d));
    for (int d = 0; d < head_dim; d += 2) std::memcpy(k + d * kPageTokens + slot * 2, rounded + d, 4);
    for (int d = 0; d < head_dim; d += 16) {
        const __m256bh half = _mm512_cvtneps_pbh(finite_or_zero(_mm512_loadu_ps(value + d)));
        const __m512i spread = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(half));
        const __m512i placed = slot % 2 ? _mm512_slli_epi32(spread, 16) : spread;
        _mm512_mask_storeu_epi16(v + d * 2, every_second(slot % 2), placed);
    }
}

// Sign and magnitude of `head_dim` values in steps of the returned scale; what is not finite counts as 0, and makes the
// scale NaN where `keep_nan`.
float quantize(const float* source, int head_dim, bool keep_nan, uint8_t* out) {
    __m512 top = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += 16)
        top = _mm512_max_ps(top, _mm512_abs_ps(finite_or_zero(_mm512_loadu_ps(source + d))));
    const float most = _mm512_reduce_max_ps(top);
    const __m512 steps = _mm512_set1_ps(most > kLeast ? kLevels / most : 0.f);
    bool finite = true;
    for (int d = 0; d < head_dim; d += 16) {
        const __m512 x = _mm512_loadu_ps(source + d), good = finite_or_zero(x);
        finite &= _mm512_cmp_ps_mask(good, x, _CMP_EQ_OQ) == 0xffff;
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(good, steps));
        const __m512i magnitude = _mm512_min_epi32(_mm512_abs_epi32(q), _mm512_set1_epi32(127));
        const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(q, 24), _mm512_set1_epi32(0x80));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + d), _mm512_cvtepi32_epi8(_mm512_or_si512(magnitude, sign)));
    }
    if (keep_nan && !finite) return __builtin_nanf("");
    return most > kLeast ? most / kLevels : 0.f;
}

// Where value `index` (0..63) of two bf16 vectors lies in their 64 bytes: unpacking the low and the high eight bytes of
// each 128-bit lane then gives the first and the second vector.
constexpr int byte_of(int index) { return index % 32 / 8 * 16 + index / 32 * 8 + index % 8; }

void write_int8(const AttentionShape& shape, uint8_t* page, int slot, const float* key, const float* value) {
    const int head_dim = shape.head_dim;
    uint8_t bytes[kMaxHeadDim];
    float* scales = reinterpret_cast<float*>(page + 2 * shape.page_values());
    scales[slot] = quantize(key, head_dim, true, bytes);
    for (int d = 0; d < head_dim; d += 2) {  // two pairs of d are a line
        uint8_t* line = page + d / 4 * 64;
        std::memcpy(line + byte_of(d / 2 % 2 * 32 + 2 * slot), bytes + d, 2);
    }
    scales[kPageTokens + slot] = quantize(value, head_dim, false, bytes);
    uint8_t* v = page + shape.page_values() + static_cast<size_t>(slot) / 2 * 2 * head_dim;
    for (int d = 0; d < head_dim; ++d) v[d / 32 * 64 + byte_of(d % 32 * 2 + slot % 2)] = bytes[d];
}

// 64 signed magnitudes as bf16 integers.
struct Unpacker {
#ifdef __AVX512VBMI__
    // The low and the high byte of bf16(m) for m = 0..127, found by byte permutation: 5 operations for 64 values.
    __m512i low[2], high[2];
    Unpacker() {
        alignas(64) uint8_t bytes[2][128];
        for (int m = 0; m < 128; ++m) {
            const float value = static_cast<float>(m);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            bytes[0][m] = static_cast<uint8_t>(bits >> 16);
            bytes[1][m] = static_cast<uint8_t>(bits >> 24);
        }
        for (int half = 0; half < 2; ++half) {
            low[half] = _mm512_load_si512(bytes[0] + 64 * half);
            high[half] = _mm512_load_si512(bytes[1] + 64 * half);
        }
    }
    void operator()(const uint8_t* line, bf16* out) const {
        const __m512i packed = _mm512_loadu_si512(line);  // the permutation reads 7 bits: it does not see the sign
        const __m512i lows = _mm512_permutex2var_epi8(low[0], packed, low[1]);
        const __m512i magnitudes = _mm512_permutex2var_epi8(high[0], packed, high[1]);
        const __m512i highs =  // magnitude | (packed & sign)
            _mm512_ternarylogic_epi32(magnitudes, packed, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
        _mm512_storeu_si512(out, _mm512_unpacklo_epi8(lows, highs));
        _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi8(lows, highs));
    }
#else
    void operator()(const uint8_t* line, bf16* out) const {
        for (int half = 0; half < 2; ++half)
            for (int lane = 0; lane < 4; lane += 2) {
                uint64_t eights[2];
                std::memcpy(&eights[0], line + lane * 16 + half * 8, 8);
                std::memcpy(&eights[1], line + lane * 16 + 16 + half * 8, 8);
                const __m512i bytes = _mm512_cvtepu8_epi32(_mm_set_epi64x(static_cast<long long>(eights[1]),
                                                                          static_cast<long long>(eights[0])));
                const __m512 m = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(127)));
                const __m512i sign = _mm512_slli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(127), bytes), 24);
                store_bf16(out + half * 32 + lane * 8, _mm512_or_ps(m, _mm512_castsi512_ps(sign)));
            }
    }
#endif
};

}  // namespace

void write_kv(const AttentionShape& shape, uint8_t* head_page, int slot, const float* key, const float* value) {
    (shape.kv_format == kKvInt8 ? write_int8 : write_bf16)(shape, head_page, slot, key, value);
}

void unpack_page(const AttentionShape& shape, const uint8_t* packed, const uint8_t* ahead, bf16* out) {
    static const Unpacker unpack;
    for (size_t i = 0; i < shape.page_values(); i += 64) {
        prefetch(ahead + i);
        unpack(packed + i, out + i);
    }
}

}  // namespace ns

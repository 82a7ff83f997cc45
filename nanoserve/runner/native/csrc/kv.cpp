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
    for (int d = 0; d < shape.head_dim; d += 16) {
        write_key_parts(page, slot, 1, d, key + d, 0);
        write_value_parts(shape, page, slot, 1, d, value + d, 0);
    }
}

// out[i] = the dwords i of 16 rows of eight, row 0's first.
void transpose(const __m256i (&rows)[kPageTokens], __m512i (&out)[8]) {
    __m512i fours[8];  // [i]: the dwords i and i + 4 of rows 0-3 and 8-11, [i + 4]: those of rows 4-7 and 12-15
    for (int i = 0; i < 2; ++i) {
        __m512i far[4];  // rows i*4 + 0..3, and those eight further on
        for (int j = 0; j < 4; ++j)
            far[j] = _mm512_inserti64x4(_mm512_castsi256_si512(rows[i * 4 + j]), rows[i * 4 + j + 8], 1);
        const __m512i low01 = _mm512_unpacklo_epi32(far[0], far[1]), high01 = _mm512_unpackhi_epi32(far[0], far[1]);
        const __m512i low23 = _mm512_unpacklo_epi32(far[2], far[3]), high23 = _mm512_unpackhi_epi32(far[2], far[3]);
        fours[i * 4] = _mm512_unpacklo_epi64(low01, low23);
        fours[i * 4 + 1] = _mm512_unpackhi_epi64(low01, low23);
        fours[i * 4 + 2] = _mm512_unpacklo_epi64(high01, high23);
        fours[i * 4 + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
    const __m512i first = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0);
    const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm512_permutex2var_epi64(fours[i], first, fours[i + 4]);
        out[i + 4] = _mm512_permutex2var_epi64(fours[i], second, fours[i + 4]);
    }
}

inline __m512i zero_extended(__m512 x) {
    return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(finite_or_zero(x))));
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

void write_key_parts(uint8_t* head_page, int slot, int count, int d, const float* rows, int stride) {
    bf16* k = reinterpret_cast<bf16*>(head_page) + d * kPageTokens;
    constexpr int kFew = 4;  // tokens, dword by dword
    if (count < kFew) {
        for (int token = 0; token < count; ++token, rows += stride) {
            alignas(32) bf16 rounded[16];
            store_bf16(rounded, _mm512_loadu_ps(rows));
            for (int i = 0; i < 16; i += 2) std::memcpy(k + i * kPageTokens + (slot + token) * 2, rounded + i, 4);
        }
        return;
    }
    __m256i rounded[kPageTokens] = {};
    for (int token = 0; token < count; ++token, rows += stride)
        rounded[slot + token] = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(rows)));
    __m512i lines[8];
    transpose(rounded, lines);
    const auto slots = static_cast<__mmask16>(((1u << count) - 1) << slot);
    for (int i = 0; i < 8; ++i) _mm512_mask_storeu_epi32(k + 2 * i * kPageTokens, slots, lines[i]);
}

void write_value_parts(const AttentionShape& shape, uint8_t* head_page, int slot, int count, int d, const float* rows,
                       int stride) {
    bf16* v = reinterpret_cast<bf16*>(head_page) + shape.page_values() + d * 2;
    for (const int end = slot + count; slot < end; ++slot, rows += stride) {
        bf16* line = v + slot / 2 * 2 * shape.head_dim;
        const __m512i one = zero_extended(_mm512_loadu_ps(rows));
        if (slot % 2) {
            _mm512_mask_storeu_epi16(line, every_second(1), _mm512_slli_epi32(one, 16));
        } else if (slot + 1 == end) {
            _mm512_mask_storeu_epi16(line, every_second(0), one);
        } else {
            ++slot, rows += stride;
            const __m512i other = _mm512_slli_epi32(zero_extended(_mm512_loadu_ps(rows)), 16);
            _mm512_storeu_si512(line, _mm512_or_si512(one, other));
        }
    }
}

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

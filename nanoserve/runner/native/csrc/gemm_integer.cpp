#include "gemm_integer.h"

#include <array>
#include <utility>

namespace ns {
namespace {

template <class T>
inline const T* of_row(const T* first, int row, size_t stride) {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(first) + row * stride);
}

// Adds weights [4 k][32 columns] times four neighbouring values of each row, as integers.
template <int ROWS>
inline __attribute__((always_inline)) void multiply_four(const int8_t* x, size_t stride, __m512i low, __m512i high,
                                                         __m512i (&dots)[ROWS][2]) {
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
        const __m512i four = broadcast_four(x + i * stride);
        dots[i][0] = _mm512_dpbusd_epi32(dots[i][0], low, four);
        dots[i][1] = _mm512_dpbusd_epi32(dots[i][1], high, four);
    }
}

// The dot products of one group's 32 k, exact.
template <int FORMAT, int ROWS>
inline __attribute__((always_inline)) void multiply_group(const uint8_t* quants, const int8_t* x, size_t stride,
                                                          Lines& next, Lines& pages, __m512i (&dots)[ROWS][2]) {
    auto fetch = [&] {
#pragma GCC unroll 2
        for (int i = 0; i < kFetchSteps / (kGroup / 4); ++i) next.fetch_one(), pages.fetch_one();
    };
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) dots[i][0] = dots[i][1] = _mm512_setzero_si512();
    if constexpr (FORMAT == kU4) {
        const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int k = 0; k < kGroup; k += 8, quants += 128) {
            const __m512i low = _mm512_loadu_si512(quants), high = _mm512_loadu_si512(quants + 64);
            fetch();
            multiply_four<ROWS>(x + k, stride, _mm512_and_si512(low, nibble), _mm512_and_si512(high, nibble), dots);
            fetch();
            multiply_four<ROWS>(x + k + 4, stride, _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble),
                                _mm512_and_si512(_mm512_srli_epi16(high, 4), nibble), dots);
        }
    } else {
#pragma GCC unroll 8
        for (int k = 0; k < kGroup; k += 4, quants += 128) {
            fetch();
            multiply_four<ROWS>(x + k, stride, _mm512_loadu_si512(quants), _mm512_loadu_si512(quants + 64), dots);
        }
    }
}

// Scales and offsets of a group's weights, which are d * u + m; sixteen columns each.
template <int FORMAT>
struct Weights {
    __m512 d0, d1, m0, m1;
    explicit Weights(const uint8_t* group) : d0(load_half(group)), d1(load_half(group + 32)) {
        if constexpr (FORMAT == kU4) {
            m0 = load_half(group + 64), m1 = load_half(group + 96);
        } else {
            m0 = _mm512_mul_ps(d0, _mm512_set1_ps(-kU8Zero)), m1 = _mm512_mul_ps(d1, _mm512_set1_ps(-kU8Zero));
        }
    }
};

template <int FORMAT, int ROWS>
inline __attribute__((always_inline)) void add_dots(const Weights<FORMAT>& w, const GroupScale* scales, size_t stride,
                                                    const __m512i (&dots)[ROWS][2], __m512 (&acc)[ROWS][2]) {
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
        const __m512 scale = _mm512_set1_ps(of_row(scales, i, stride)->scale);
        const __m512 sum = _mm512_set1_ps(of_row(scales, i, stride)->sum);
        acc[i][0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dots[i][0]), w.d0), scale, acc[i][0]);
        acc[i][1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dots[i][1]), w.d1), scale, acc[i][1]);
        acc[i][0] = _mm512_fmadd_ps(w.m0, sum, acc[i][0]);
        acc[i][1] = _mm512_fmadd_ps(w.m1, sum, acc[i][1]);
    }
}

// A row's far value at one k of a group, 0 where it has none.
inline float far_at(const GroupScale& group, const float* list, int k) {
    const uint32_t before = group.far & ((uint32_t{1} << k) - 1), has = group.far >> k & 1;
    return list[(group.first + __builtin_popcount(before)) & (0 - has)];
}

// The far values of a group, those of any of the rows, one k at a time: where a row has none there, it adds 0.
template <int FORMAT, int ROWS>
inline __attribute__((always_inline)) void add_far(uint32_t which, const Weights<FORMAT>& w, const uint8_t* quants,
                                                   const GroupScale* scales, const float* far, size_t stride,
                                                   __m512 (&acc)[ROWS][2]) {
    constexpr int kTogether = FORMAT == kU4 ? 8 : 4;  // k in one dword of a column
    const __m512i most = _mm512_set1_epi32(FORMAT == kU4 ? 15 : 255);
    for (; which; which &= which - 1) {
        const int k = __builtin_ctz(which);
        const uint8_t* dwords = quants + k / kTogether * 128;
        const __m128i shift = _mm_cvtsi32_si128(k % 4 * 8 + k % kTogether / 4 * 4);
        auto weights = [&](const uint8_t* source, __m512 d, __m512 m) {
            const __m512i u = _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(source), shift), most);
            return _mm512_fmadd_ps(_mm512_cvtepi32_ps(u), d, m);
        };
        const __m512 low = weights(dwords, w.d0, w.m0), high = weights(dwords + 64, w.d1, w.m1);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; ++i) {
            const __m512 value = _mm512_set1_ps(far_at(*of_row(scales, i, stride), of_row(far, i, stride), k));
            acc[i][0] = _mm512_fmadd_ps(low, value, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(high, value, acc[i][1]);
        }
    }
}

// ROWS rows by a panel's 32 columns. A row's sum takes its groups in order, each with its far values behind it, whatever
// the tile: the same row gives the same bits in every batch.
template <int FORMAT, int ROWS>
void run_tile(const ProductTile& tile, int row) {
    const IntegerRows& rows = tile.job.integers;
    const int k = tile.job.weight->k;
    const size_t stride = IntegerRows::stride(k);
    const int8_t* x = rows.quants(row);
    const float* far = rows.far(row);
    const GroupScale* scales = rows.scales(row);
    const uint8_t *group = tile.packed, *ahead = tile.ahead;
    KvPieces kv = tile.kv;
    __m512 acc[ROWS][2] = {};
    prefetch_logits<ROWS>(tile, row);
    for (int k0 = 0; k0 < k; k0 += kGroup, group += group_bytes(FORMAT), ++scales) {
        Lines next = Lines::of(ahead, tile.ahead_lines), pages = kv.next();
        ahead = next.end;
        const uint8_t* quants = group + (FORMAT == kU4 ? 128 : 64);
        __m512i dots[ROWS][2];
        multiply_group<FORMAT, ROWS>(quants, x + k0, stride, next, pages, dots);
        next.fetch_rest();
        const Weights<FORMAT> weights(group);
        add_dots<FORMAT, ROWS>(weights, scales, stride, dots, acc);
        uint32_t which = 0;
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; ++i) which |= of_row(scales, i, stride)->far;
        if (which) add_far<FORMAT, ROWS>(which, weights, quants, scales, far, stride, acc);
    }
    finish<ROWS>(tile, row, acc);
}

template <int FORMAT, int... ROWS>
constexpr std::array<TileFunction, sizeof...(ROWS) + 1> tiles_of(std::integer_sequence<int, ROWS...>) {
    return {nullptr, run_tile<FORMAT, ROWS + 1>...};
}
template <int FORMAT>
constexpr auto kTiles = tiles_of<FORMAT>(std::make_integer_sequence<int, kIntegerTileRows>{});

}  // namespace

TileFunction integer_tile_function(int format, int rows) { return (format == kU4 ? kTiles<kU4> : kTiles<kU8>)[rows]; }

}  // namespace ns

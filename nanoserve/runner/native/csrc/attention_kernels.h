// The register kernels of paged attention: scores, softmax numerators, weighted values. Included by attention.cpp only.
//
// Loops over accumulators are unrolled by force, else gcc keeps them in memory. A row's terms are added in order of d
// and of tokens whatever rows it is computed with.
#pragma once
#include <algorithm>
#include <utility>

#include "kv.h"

namespace ns {
namespace {

constexpr int kBlockRows = 12;  // query rows that go through scores, softmax and values together: 12 KB of scores
constexpr int kValueRows = 6;
constexpr int kScoreStride = 256;  // tokens of a segment

// Up to four pages of keys, and the pages to fetch meanwhile.
struct KeyPages {
    const bf16* keys[4];
    const bf16* ahead[4];
    const float* scales[4];  // null with bf16
};

constexpr int score_pages(int rows) { return rows > 6 ? 2 : 4; }

// ROWS query rows, packed [head_dim/2][ROWS][2], against N pages: scores [ROWS, N*16]. With AHEAD one line of a later
// page is fetched per line used.
template <int ROWS, int N, bool AHEAD>
inline __attribute__((always_inline)) void scores_kernel(const bf16* q, int head_dim, const KeyPages& pages,
                                                         float* out) {
    __m512 acc[ROWS][N] = {};
    for (int d = 0; d < head_dim; d += 2, q += 2 * ROWS) {
        __m512bh keys[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            keys[j] = load_pairs(pages.keys[j] + d * kPageTokens);
            if (AHEAD) prefetch(pages.ahead[j] + d * kPageTokens);
        }
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i) {
            const __m512bh pair = broadcast_pair(q + 2 * i);
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], keys[j], pair);
        }
    }
    if (pages.scales[0]) {
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            const __m512 scale = _mm512_loadu_ps(pages.scales[j]);
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i) acc[i][j] = _mm512_mul_ps(acc[i][j], scale);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) _mm512_storeu_ps(out + i * kScoreStride + j * kPageTokens, acc[i][j]);
}

template <int ROWS>
void scores_of(const bf16* q, int head_dim, const KeyPages& pages, bool fetch, float* out) {
    fetch ? scores_kernel<ROWS, score_pages(ROWS), true>(q, head_dim, pages, out)
          : scores_kernel<ROWS, score_pages(ROWS), false>(q, head_dim, pages, out);
}

// ROWS rows of probabilities times V, for COLS*16 columns of d.
template <int ROWS, int COLS, bool AHEAD>
inline __attribute__((always_inline)) void values_kernel(const bf16* probs, const bf16* const* values,
                                                         const bf16* const* ahead, int num_pages, int head_dim,
                                                         int column, float* out) {
    __m512 acc[ROWS][COLS] = {};
    for (int page = 0; page < num_pages; ++page) {
        const bf16* v = values[page] + column * 2;
        const bf16* later = AHEAD ? ahead[page] + column * 2 : v;
        for (int t = 0; t < kPageTokens; t += 2, v += 2 * head_dim, later += 2 * head_dim) {
            __m512bh value[COLS];
#pragma GCC unroll 4
            for (int c = 0; c < COLS; ++c) {
                value[c] = load_pairs(v + c * 32);
                if (AHEAD) prefetch(later + c * 32);
            }
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; ++i) {
                const __m512bh pair = broadcast_pair(probs + i * kScoreStride + page * kPageTokens + t);
#pragma GCC unroll 4
                for (int c = 0; c < COLS; ++c) acc[i][c] = _mm512_dpbf16_ps(acc[i][c], value[c], pair);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < COLS; ++c) _mm512_storeu_ps(out + i * head_dim + column + c * 16, acc[i][c]);
}

template <int ROWS, bool AHEAD>
void values_of(const bf16* probs, const bf16* const* values, const bf16* const* ahead, int num_pages, int head_dim,
               float* out) {
    int column = 0;
    for (; column + 64 <= head_dim; column += 64)
        values_kernel<ROWS, 4, AHEAD>(probs, values, ahead, num_pages, head_dim, column, out);
    if (column < head_dim) values_kernel<ROWS, 2, AHEAD>(probs, values, ahead, num_pages, head_dim, column, out);
}

using ScoresFunction = void (*)(const bf16*, int, const KeyPages&, bool, float*);
using ValuesFunction = void (*)(const bf16*, const bf16* const*, const bf16* const*, int, int, float*);
template <int... ROWS>
ScoresFunction scores_function(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr ScoresFunction table[] = {scores_of<ROWS + 1>...};
    return table[rows - 1];
}
template <bool AHEAD, int... ROWS>
ValuesFunction values_function(int rows, std::integer_sequence<int, ROWS...>) {
    static constexpr ValuesFunction table[] = {values_of<ROWS + 1, AHEAD>...};
    return table[rows - 1];
}

// Which tokens of a row's pages it sees: oldest..newest, relative to the first of these pages. Pages clean_begin ..
// clean_end-1 are known to be seen whole; with CLEAN all are.
template <bool CLEAN>
struct Seen {
    int oldest, newest, clean_begin, clean_end;
    bool whole(int page) const { return CLEAN || (page >= clean_begin && page < clean_end); }
    __mmask16 tokens(int page) const {
        const int low = std::clamp(oldest - page * kPageTokens, 0, 16),
                  high = std::clamp(newest + 1 - page * kPageTokens, 0, 16);
        return static_cast<__mmask16>(((1u << high) - 1) & ~((1u << low) - 1));
    }
};

// The largest score of one row over its pages, `none` where all are masked, and no number where a score is none.
template <bool CLEAN>
float largest(const float* scores, int num_pages, const Seen<CLEAN>& seen, float none) {
    const __m512 nothing = _mm512_set1_ps(none);
    __m512 first_top = nothing, second_top = nothing;
    __mmask16 broken = 0;  // lanes with what is no number, which a maximum may pass over
    auto of_page = [&](int page) __attribute__((always_inline)) {
        const __m512 s = _mm512_loadu_ps(scores + page * kPageTokens);
        return seen.whole(page) ? s : _mm512_mask_mov_ps(nothing, seen.tokens(page), s);
    };
    for (int page = 0; page < num_pages; page += 2) {
        const __m512 first = of_page(page), second = page + 1 < num_pages ? of_page(page + 1) : nothing;
        first_top = _mm512_max_ps(first_top, first), second_top = _mm512_max_ps(second_top, second);
        broken |= _mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q);
    }
    return broken ? kNotANumber : _mm512_reduce_max_ps(_mm512_max_ps(first_top, second_top));
}

// Softmax numerators of one row, rounded to bf16, and the sum that they are to be divided by. Each page has its own
// eight lanes of the sum by whether it is odd or even, so the first page must be even in its segment.
//
// The sum is that of the rounded numerators, as weights must add up to 1: a row that looks at one token gets exactly
// its value.
template <bool CLEAN>
float numerators(const float* scores, bf16* probs, int num_pages, const Seen<CLEAN>& seen, float most) {
    const BinaryExponents exponents(most);
    const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    __m512 total = _mm512_setzero_ps();
    auto of_page = [&](int page) __attribute__((always_inline)) {
        const __m512i e = exponents.of(_mm512_loadu_ps(scores + page * kPageTokens));
        return seen.whole(page) ? e : _mm512_maskz_mov_epi32(seen.tokens(page), e);
    };
    for (int page = 0; page < num_pages; page += 2) {
        const __m512i first = of_page(page), second = page + 1 < num_pages ? of_page(page + 1) : _mm512_setzero_si512();
        const __m512i pair = exponents.powers(first, second);
        total = _mm512_dpbf16_ps(total, reinterpret_cast<__m512bh>(pair), ones);
        _mm512_storeu_si512(probs + page * kPageTokens, pair);
    }
    return _mm512_reduce_add_ps(total);
}

// The same where values have scales (one pointer per page): what is stored is each numerator times its token's scale, and
// the sum is without them, hence of what is not rounded yet.
template <bool CLEAN>
float scaled_numerators(const float* scores, bf16* probs, int num_pages, const Seen<CLEAN>& seen, float most,
                        const float* const* value_scales) {
    const __m512 shift = _mm512_set1_ps(most);
    __m512 total = _mm512_setzero_ps();
    auto of_page = [&](int page) __attribute__((always_inline)) {
        __m512 e = exp2_of_negative(_mm512_sub_ps(_mm512_loadu_ps(scores + page * kPageTokens), shift));
        if (!seen.whole(page)) e = _mm512_maskz_mov_ps(seen.tokens(page), e);
        total = _mm512_add_ps(total, e);
        return _mm512_mul_ps(e, _mm512_loadu_ps(value_scales[page]));
    };
    for (int page = 0; page < num_pages; page += 2) {
        const __m512 first = of_page(page), second = page + 1 < num_pages ? of_page(page + 1) : _mm512_setzero_ps();
        const __m512bh pair = _mm512_cvtne2ps_pbh(second, first);
        _mm512_storeu_si512(probs + page * kPageTokens, reinterpret_cast<__m512i>(pair));
    }
    return _mm512_reduce_add_ps(total);
}

}  // namespace
}  // namespace ns

#include "attention.h"

#include <algorithm>
#include <cmath>

namespace ns {
namespace {

constexpr float kNone = -1.0e30f;  // the maximum of no scores

struct Pages {
    const bf16* page[4];
    const bf16* ahead[4];
};

// ROWS query rows against N pages: scores [ROWS, N*16]. One line of the page that comes later is fetched per line used.
template <int ROWS, int N>
inline __attribute__((always_inline)) void scores_kernel(const bf16* q, int head_dim, const Pages& pages, float* out) {
    __m512 acc[ROWS][N];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) acc[i][j] = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += 2) {
        __m512bh keys[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            keys[j] = load_pairs(pages.page[j] + d * kPageTokens);
            prefetch(pages.ahead[j] + d * kPageTokens);
        }
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i) {
            const __m512bh pair = broadcast_pair(q + i * head_dim + d);
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], keys[j], pair);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) _mm512_storeu_ps(out + i * kSegmentTokens + j * kPageTokens, acc[i][j]);
}

template <int ROWS>
void scores_of(const bf16* q, int head_dim, const Pages& pages, float* out) {
    constexpr int N = ROWS > 6 ? 2 : 4;
    scores_kernel<ROWS, N>(q, head_dim, pages, out);
}

// ROWS rows of probabilities times V, for COLS*16 columns of d. Pages in order, token pairs in order.
template <int ROWS, int COLS>
inline __attribute__((always_inline)) void values_kernel(const bf16* probs, const bf16* const* pages,
                                                         const bf16* const* ahead, int num_pages, int head_dim,
                                                         int column, float* out) {
    __m512 acc[ROWS][COLS];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < COLS; ++c) acc[i][c] = _mm512_setzero_ps();
    for (int page = 0; page < num_pages; ++page) {
        const size_t offset = (static_cast<size_t>(kPageTokens) * head_dim) + column * 2;  // V lies behind K
        const bf16* v = pages[page] + offset;
        const bf16* later = ahead[page] + offset;
        for (int t = 0; t < kPageTokens; t += 2, v += 2 * head_dim, later += 2 * head_dim) {
            __m512bh value[COLS];
#pragma GCC unroll 4
            for (int c = 0; c < COLS; ++c) {
                value[c] = load_pairs(v + c * 32);
                prefetch(later + c * 32);
            }
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; ++i) {
                const __m512bh pair = broadcast_pair(probs + i * kSegmentTokens + page * kPageTokens + t);
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

using ScoresFunction = void (*)(const bf16*, int, const Pages&, float*);
constexpr ScoresFunction kScores[13] = {nullptr,       scores_of<1>,  scores_of<2>, scores_of<3>, scores_of<4>,
                                        scores_of<5>,  scores_of<6>,  scores_of<7>, scores_of<8>, scores_of<9>,
                                        scores_of<10>, scores_of<11>, scores_of<12>};

template <int ROWS>
void values_of(const bf16* probs, const bf16* const* pages, const bf16* const* ahead, int num_pages, int head_dim,
               float* out) {
    int column = 0;
    for (; column + 64 <= head_dim; column += 64)
        values_kernel<ROWS, 4>(probs, pages, ahead, num_pages, head_dim, column, out);
    if (column < head_dim) values_kernel<ROWS, 2>(probs, pages, ahead, num_pages, head_dim, column, out);
}

using ValuesFunction = void (*)(const bf16*, const bf16* const*, const bf16* const*, int, int, float*);
constexpr ValuesFunction kValues[7] = {nullptr,      values_of<1>, values_of<2>, values_of<3>,
                                       values_of<4>, values_of<5>, values_of<6>};

// Which of a page's 16 tokens are in oldest..newest; both relative to the segment's first page.
inline __mmask16 alive(int page, int oldest, int newest) {
    const int low = std::clamp(oldest - page * kPageTokens, 0, 16),
              high = std::clamp(newest + 1 - page * kPageTokens, 0, 16);
    return static_cast<__mmask16>(((1u << high) - 1) & ~((1u << low) - 1));
}

// The largest score of one row over the segment's pages; kNone where all are masked.
template <bool MASKED>
float largest(const float* scores, int num_pages, int oldest, int newest) {
    __m512 top = _mm512_set1_ps(kNone);
    for (int page = 0; page < num_pages; ++page) {
        const __m512 s = _mm512_loadu_ps(scores + page * kPageTokens);
        top = MASKED ? _mm512_mask_max_ps(top, alive(page, oldest, newest), top, s) : _mm512_max_ps(top, s);
    }
    return _mm512_reduce_max_ps(top);
}

// Softmax numerators of one row, and their sum.
template <bool MASKED>
float exponentials(const float* scores, bf16* probs, int num_pages, int oldest, int newest, float most) {
    const __m512 shift = _mm512_set1_ps(most);
    __m512 total = _mm512_setzero_ps();
    for (int page = 0; page < num_pages; ++page) {
        __m512 e = exp2_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + page * kPageTokens), shift));
        if (MASKED) e = _mm512_maskz_mov_ps(alive(page, oldest, newest), e);
        total = _mm512_add_ps(total, e);
        store_bf16(probs + page * kPageTokens, e);
    }
    return _mm512_reduce_add_ps(total);
}

}  // namespace

AttentionScratch::AttentionScratch(const AttentionShape& shape) {
    const size_t rows = static_cast<size_t>(tile_tokens(shape)) * shape.group() + 16;
    const size_t sizes[] = {rows * kSegmentTokens * 4,
                            rows * kSegmentTokens * 2,
                            rows * shape.head_dim * 2,
                            rows * 4,
                            rows * 4,
                            rows * shape.head_dim * 4,
                            rows * 4,
                            rows * 4,
                            rows * shape.head_dim * 4};
    size_t total = 64;
    for (size_t size : sizes) total += (size + 63) & ~size_t{63};
    memory_.assign(total, 0);
    uint8_t* cursor = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
    int which = 0;
    auto take = [&] {
        uint8_t* here = cursor;
        cursor += (sizes[which++] + 63) & ~size_t{63};
        return here;
    };
    scores = reinterpret_cast<float*>(take());
    probs = reinterpret_cast<bf16*>(take());
    queries = reinterpret_cast<bf16*>(take());
    for (Partial* partial : {&running, &current}) {
        partial->max = reinterpret_cast<float*>(take());
        partial->sum = reinterpret_cast<float*>(take());
        partial->values = reinterpret_cast<float*>(take());
    }
}

void attend_segment(const AttentionShape& shape, int window, const bf16* queries, const bf16* layer, const Tile& tile,
                    int kv_head, int segment, const Tile* ahead, int ahead_kv_head, int ahead_segment,
                    AttentionScratch& scratch, const Partial& result) {
    const int group = shape.group(), head_dim = shape.head_dim, rows = tile.num_tokens * group;
    const int last_position = tile.first_position + tile.num_tokens - 1;
    const int oldest_needed = window > 0 ? std::max(0, tile.first_position - window + 1) : 0;
    const int first_page = std::max(segment * kSegmentPages, oldest_needed / kPageTokens);
    const int end_page = std::min((segment + 1) * kSegmentPages, last_position / kPageTokens + 1);
    const int num_pages = end_page - first_page;

    const bf16* pages[kSegmentPages + 4];
    const bf16* later[kSegmentPages + 4];
    const int ahead_end = ahead ? (ahead->first_position + ahead->num_tokens - 1) / kPageTokens + 1 : 0;
    for (int i = 0; i < kSegmentPages + 4; ++i) {  // the last page again as padding: its scores are not used
        const int page = first_page + std::min(i, num_pages - 1);
        pages[i] = layer + tile.pages[page] * shape.page() + kv_head * shape.head_page();
        const int next = ahead_segment * kSegmentPages + i;
        later[i] =
            next < ahead_end ? layer + ahead->pages[next] * shape.page() + ahead_kv_head * shape.head_page() : pages[i];
    }
    const bf16* q =
        queries + static_cast<size_t>(tile.first_token) * shape.num_heads * head_dim + kv_head * group * head_dim;
    if (tile.num_tokens > 1) {
        for (int i = 0; i < tile.num_tokens; ++i)
            std::memcpy(scratch.queries + i * group * head_dim, q + static_cast<size_t>(i) * shape.num_heads * head_dim,
                        group * head_dim * sizeof(bf16));
        q = scratch.queries;
    }
    for (int row = 0, left = rows, parts = (rows + 11) / 12; parts > 0; --parts) {
        const int count = (left + parts - 1) / parts, step = count > 6 ? 2 : 4;
        for (int page = 0; page < num_pages; page += step) {
            Pages batch;
            for (int i = 0; i < step; ++i) {
                batch.page[i] = pages[page + i];
                batch.ahead[i] = later[page + i];
            }
            kScores[count](q + row * head_dim, head_dim, batch,
                           scratch.scores + row * kSegmentTokens + page * kPageTokens);
        }
        row += count;
        left -= count;
    }
    const int base = first_page * kPageTokens;
    auto oldest = [&](int row) {
        return window > 0 ? std::max(0, tile.first_position + row / group - window + 1) - base : 0;
    };
    auto newest = [&](int row) { return tile.first_position + row / group - base; };
    auto whole = [&](int row) { return oldest(row) <= 0 && newest(row) >= num_pages * kPageTokens - 1; };
    // All rows' largest scores first: one row's would wait for its own reduction.
    for (int row = 0; row < rows; ++row)
        result.max[row] = (whole(row) ? largest<false> : largest<true>)(scratch.scores + row * kSegmentTokens,
                                                                        num_pages, oldest(row), newest(row));
    for (int row = 0; row < rows; ++row)
        result.sum[row] = (whole(row) ? exponentials<false> : exponentials<true>)(
            scratch.scores + row * kSegmentTokens, scratch.probs + row * kSegmentTokens, num_pages, oldest(row),
            newest(row), result.max[row]);
    for (int row = 0, left = rows, parts = (rows + 5) / 6; parts > 0; --parts) {
        const int count = (left + parts - 1) / parts;
        kValues[count](scratch.probs + row * kSegmentTokens, pages, later, num_pages, head_dim,
                       result.values + row * head_dim);
        row += count;
        left -= count;
    }
}

void merge(const Partial& running, const Partial& next, int rows, int head_dim) {
    for (int row = 0; row < rows; ++row) {
        if (next.sum[row] == 0) continue;  // wholly masked for this row
        const float most = std::max(running.max[row], next.max[row]);
        const __m512 keep = exp2_ps(_mm512_set1_ps(running.sum[row] == 0 ? -200.f : running.max[row] - most));
        const __m512 add = exp2_ps(_mm512_set1_ps(next.max[row] - most));
        running.max[row] = most;
        running.sum[row] = running.sum[row] * _mm512_cvtss_f32(keep) + next.sum[row] * _mm512_cvtss_f32(add);
        float* to = running.values + row * head_dim;
        const float* from = next.values + row * head_dim;
        for (int d = 0; d < head_dim; d += 16) {
            const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(to + d), keep);
            _mm512_storeu_ps(to + d, _mm512_fmadd_ps(_mm512_loadu_ps(from + d), add, kept));
        }
    }
}

void finish_attention(const AttentionShape& shape, const Partial& total, const Tile& tile, int kv_head, bf16* out) {
    const int group = shape.group(), head_dim = shape.head_dim;
    for (int row = 0; row < tile.num_tokens * group; ++row) {
        const size_t token = tile.first_token + row / group, head = kv_head * group + row % group;
        bf16* target = out + (token * shape.num_heads + head) * head_dim;
        const __m512 scale = _mm512_set1_ps(1.f / total.sum[row]);
        for (int d = 0; d < head_dim; d += 16)
            store_bf16(target + d, _mm512_mul_ps(_mm512_loadu_ps(total.values + row * head_dim + d), scale));
    }
}

void write_kv(const AttentionShape& shape, bf16* layer, int page, int slot, int kv_head, const float* key,
              const float* value) {
    const int head_dim = shape.head_dim;
    bf16* k = layer + page * shape.page() + kv_head * shape.head_page();
    bf16* v = k + static_cast<size_t>(kPageTokens) * head_dim + slot / 2 * 2 * head_dim + slot % 2;
    alignas(64) bf16 rounded[kMaxHeadDim];
    for (int d = 0; d < head_dim; d += 16) store_bf16(rounded + d, _mm512_loadu_ps(key + d));
    for (int d = 0; d < head_dim; d += 2) std::memcpy(k + d * kPageTokens + slot * 2, rounded + d, 4);
    for (int d = 0; d < head_dim; d += 16) {
        const __m512 part = _mm512_loadu_ps(value + d);
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(part), _mm512_set1_ps(3.0e38f), _CMP_LE_OQ);
        store_bf16(rounded + d, _mm512_maskz_mov_ps(finite, part));
    }
    for (int d = 0; d < head_dim; ++d) v[d * 2] = rounded[d];
}

}  // namespace ns

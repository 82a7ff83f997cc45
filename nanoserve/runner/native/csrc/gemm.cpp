#include "gemm.h"

#include <algorithm>

namespace ns {
namespace {

// Rows of x in one register tile: 12 x 2 accumulators, 2 weights and a broadcast fill 27 of the 32 registers.
constexpr int kTileRows = 12;
// x rows that stay in the L2 cache while weights stream past them.
constexpr size_t kSlabBytes = 480 << 10;

struct Tile {
    const GemmJob& job;
    const bf16* weights;  // one panel in kBf16 form
    int panel;
    const uint8_t* ahead;  // prefetched evenly over the tile
    int ahead_lines;       // per 32 k
};

template <int ROWS>
inline __attribute__((always_inline)) void finish_logits(const Tile& tile, int row, __m512 (&acc)[ROWS][2]) {
    const GemmJob& job = tile.job;
    const int column = tile.panel * kPanel;
    const int live = std::min(kPanel, job.weight->n - column);
    const __mmask16 mask0 = static_cast<__mmask16>((1u << std::min(live, 16)) - 1);
    const __mmask16 mask1 = static_cast<__mmask16>((1u << std::max(live - 16, 0)) - 1);
    const __m512 lowest = _mm512_set1_ps(-3.0e38f);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
        if (job.out) {
            float* out = static_cast<float*>(job.out) + static_cast<size_t>(row + i) * job.ld + column;
            _mm512_mask_storeu_ps(out, mask0, acc[i][0]);
            _mm512_mask_storeu_ps(out + 16, mask1, acc[i][1]);
        }
        const __m512 low = _mm512_mask_blend_ps(mask0, lowest, acc[i][0]);
        const __m512 high = _mm512_mask_blend_ps(mask1, lowest, acc[i][1]);
        const float top = _mm512_reduce_max_ps(_mm512_max_ps(low, high));
        Best& best = job.best[row + i];
        if (top < best.value) continue;
        const uint32_t where = _mm512_cmpeq_ps_mask(low, _mm512_set1_ps(top)) |
                               static_cast<uint32_t>(_mm512_cmpeq_ps_mask(high, _mm512_set1_ps(top))) << 16;
        if (where == 0) continue;
        const int index = column + __builtin_ctz(where);
        if (top > best.value || index < best.index) best = {top, index};  // ties: the lowest id, whoever came first
    }
}

template <int ROWS>
inline __attribute__((always_inline)) void finish(const Tile& tile, int row, __m512 (&acc)[ROWS][2]) {
    const GemmJob& job = tile.job;
    if (job.epilogue == Epilogue::kLogits) return finish_logits<ROWS>(tile, row, acc);
    if (job.epilogue == Epilogue::kSiluMul || job.epilogue == Epilogue::kGeluMul) {
        bf16* out = static_cast<bf16*>(job.out) + static_cast<size_t>(row) * job.ld + tile.panel * (kPanel / 2);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i, out += job.ld) {
            const __m512 gate = acc[i][0];
            const __m512 act = job.epilogue == Epilogue::kSiluMul ? silu_ps(gate) : gelu_tanh_ps(gate);
            store_bf16(out, _mm512_mul_ps(act, acc[i][1]));
        }
        return;
    }
    float* out = static_cast<float*>(job.out) + static_cast<size_t>(row) * job.ld + tile.panel * kPanel;
    __m512 base0 = _mm512_setzero_ps(), base1 = _mm512_setzero_ps();
    if (job.weight->bias) {
        base0 = _mm512_loadu_ps(job.weight->bias + tile.panel * kPanel);
        base1 = _mm512_loadu_ps(job.weight->bias + tile.panel * kPanel + 16);
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i, out += job.ld) {
        __m512 low = _mm512_add_ps(acc[i][0], base0), high = _mm512_add_ps(acc[i][1], base1);
        if (job.epilogue == Epilogue::kAdd) {
            low = _mm512_add_ps(low, _mm512_loadu_ps(out));
            high = _mm512_add_ps(high, _mm512_loadu_ps(out + 16));
        }
        _mm512_storeu_ps(out, low);
        _mm512_storeu_ps(out + 16, high);
    }
}

// ROWS rows by 32 columns over the whole of K. Each accumulator takes its products in order of k whatever ROWS is:
// the same row gives the same bits in every batch. All loops over accumulators are unrolled by force, else gcc
// keeps them in memory (35-43 % of peak instead of 90).
template <int ROWS>
void run_tile(const Tile& tile, int row) {
    const int k = tile.job.weight->k;
    const bf16* x = tile.job.x + static_cast<size_t>(row) * k;
    const bf16* w = tile.weights;
    const uint8_t* ahead = tile.ahead;
    __m512 acc[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (int k0 = 0; k0 < k; k0 += kGroup) {
        for (int line = 0; line < tile.ahead_lines; ++line, ahead += 64) prefetch(ahead);
        for (int j = k0; j < k0 + kGroup; j += 2, w += 2 * kPanel) {
            const __m512bh w0 = load_pairs(w), w1 = load_pairs(w + kPanel);
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i) {
                const __m512bh pair = broadcast_pair(x + static_cast<size_t>(i) * k + j);
                acc[i][0] = _mm512_dpbf16_ps(acc[i][0], w0, pair);
                acc[i][1] = _mm512_dpbf16_ps(acc[i][1], w1, pair);
            }
        }
    }
    finish<ROWS>(tile, row, acc);
}

using TileFunction = void (*)(const Tile&, int);
constexpr TileFunction kTiles[kTileRows + 1] = {
    nullptr,     run_tile<1>, run_tile<2>, run_tile<3>,  run_tile<4>,  run_tile<5>, run_tile<6>,
    run_tile<7>, run_tile<8>, run_tile<9>, run_tile<10>, run_tile<11>, run_tile<12>};

int slab_rows(const Linear& weight, int m) {
    const int fit = static_cast<int>(kSlabBytes / (static_cast<size_t>(weight.k) * sizeof(bf16)));
    const int whole = std::max(kTileRows, fit / kTileRows * kTileRows);
    return m <= whole ? std::max(m, 1) : whole;
}

}  // namespace

int gemm_items(const Linear& weight, int m) {
    const int slab = slab_rows(weight, m);
    return (m + slab - 1) / slab * num_panels(weight.n);
}

const uint8_t* first_panel(const Linear& weight, int m, int thread, int threads) {
    const int item = Phases::share_begin(gemm_items(weight, m), thread, threads);
    return weight.panels + static_cast<size_t>(item % num_panels(weight.n)) * panel_bytes(weight.format, weight.k);
}

void gemm(Phases& phases, int thread, const GemmJob& job, bf16* scratch) {
    const Linear& weight = *job.weight;
    const size_t bytes = panel_bytes(weight.format, weight.k);
    const int panels = num_panels(weight.n), slab = slab_rows(weight, job.m);
    for (int item = phases.claim(thread); item >= 0;) {
        const int next = phases.claim(thread);  // claimed now, so that its weights can be fetched meanwhile
        const uint8_t* panel = weight.panels + static_cast<size_t>(item % panels) * bytes;
        const uint8_t* ahead = next < 0 ? job.next_phase : weight.panels + static_cast<size_t>(next % panels) * bytes;
        const int begin = item / panels * slab, end = std::min(begin + slab, job.m);
        const int tiles = (end - begin + kTileRows - 1) / kTileRows;
        Tile tile{job, reinterpret_cast<const bf16*>(panel), item % panels, ahead, 0};
        size_t step = 0;
        if (weight.format != kBf16) {
            decode_panel(scratch, panel, weight.format, weight.k, ahead);
            tile.weights = scratch;
        } else if (ahead) {
            tile.ahead_lines = (kGroup + tiles - 1) / tiles;  // a panel has one line per k
            step = static_cast<size_t>(tile.ahead_lines) * 64 * (weight.k / kGroup);
        }
        for (int i = 0, row = begin; i < tiles; ++i) {  // rows spread evenly: 32 is 11 + 11 + 10, not 12 + 12 + 8
            const int rows = (end - row + tiles - i - 1) / (tiles - i);
            kTiles[rows](tile, row);
            tile.ahead += step;
            row += rows;
        }
        item = next;
    }
}

}  // namespace ns

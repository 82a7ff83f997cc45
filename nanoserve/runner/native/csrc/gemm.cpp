#include "gemm.h"

#include <algorithm>
#include <array>
#include <utility>

#include "decode.h"

namespace ns {
namespace {

// Rows of x in one register tile: 12 x 2 accumulators, 2 weights and a broadcast fill 27 of the 32 registers.
constexpr int kTileRows = 12;
// x rows that stay in the L2 cache while weights stream past them.
constexpr size_t kSlabBytes = 480 << 10;

// Up to so many rows, two panels go side by side: one panel's chains of dependent additions would leave the core idle.
constexpr int kWideRows = 2;

struct Tile {
    const GemmJob& job;
    const uint8_t* panels;  // the first panel as stored
    bf16* decoded;          // where a quantized panel goes in the kBf16 form, for the tiles after the first
    int panel;              // index of the first
    const uint8_t* ahead;   // prefetched evenly over the tile
    int ahead_lines;        // per 32 k
};

template <int ROWS>
inline __attribute__((always_inline)) void finish_logits(const Tile& tile, int panel, int row, __m512 (&acc)[ROWS][2]) {
    const GemmJob& job = tile.job;
    const int column = panel * kPanel;
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
inline __attribute__((always_inline)) void finish(const Tile& tile, int panel, int row, __m512 (&acc)[ROWS][2]) {
    const GemmJob& job = tile.job;
    if (job.epilogue == Epilogue::kLogits) return finish_logits<ROWS>(tile, panel, row, acc);
    if (job.epilogue == Epilogue::kSiluMul || job.epilogue == Epilogue::kGeluMul) {
        bf16* out = static_cast<bf16*>(job.out) + static_cast<size_t>(row) * job.ld + panel * (kPanel / 2);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i, out += job.ld) {
            const __m512 gate = acc[i][0];
            const __m512 act = job.epilogue == Epilogue::kSiluMul ? silu_ps(gate) : gelu_tanh_ps(gate);
            store_bf16(out, _mm512_mul_ps(act, acc[i][1]));
        }
        return;
    }
    float* out = static_cast<float*>(job.out) + static_cast<size_t>(row) * job.ld + panel * kPanel;
    __m512 base0 = _mm512_setzero_ps(), base1 = _mm512_setzero_ps();
    if (job.weight->bias) {
        base0 = _mm512_loadu_ps(job.weight->bias + panel * kPanel);
        base1 = _mm512_loadu_ps(job.weight->bias + panel * kPanel + 16);
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

template <int ROWS, int PANELS>
inline __attribute__((always_inline)) void multiply_pair(const bf16* x, int k, const __m512bh (&w)[PANELS][2],
                                                         __m512 (&acc)[PANELS][ROWS][2]) {
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
        const __m512bh pair = broadcast_pair(x + static_cast<size_t>(i) * k);
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; ++p) {
            acc[p][i][0] = _mm512_dpbf16_ps(acc[p][i][0], w[p][0], pair);
            acc[p][i][1] = _mm512_dpbf16_ps(acc[p][i][1], w[p][1], pair);
        }
    }
}

// ROWS rows by PANELS*32 columns over the whole of K, from panels in the kBf16 form. Each accumulator takes its
// products in order of k whatever the tile: the same row gives the same bits in every batch. All loops over
// accumulators are unrolled by force, else gcc keeps them in memory (35-43 % of peak instead of 90).
template <int ROWS, int PANELS>
inline __attribute__((always_inline)) void run_plain(const Tile& tile, const bf16* w, int row) {
    const int k = tile.job.weight->k;
    const size_t panel_size = static_cast<size_t>(k) * kPanel;
    const bf16* x = tile.job.x + static_cast<size_t>(row) * k;
    const uint8_t* ahead = tile.ahead;
    __m512 acc[PANELS][ROWS][2] = {};
    for (int k0 = 0; k0 < k; k0 += kGroup) {
        for (int line = 0; line < tile.ahead_lines; ++line, ahead += 64) prefetch(ahead);
        for (int j = k0; j < k0 + kGroup; j += 2, w += 2 * kPanel) {
            __m512bh weights[PANELS][2];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; ++p) {
                weights[p][0] = load_pairs(w + p * panel_size);
                weights[p][1] = load_pairs(w + p * panel_size + kPanel);
            }
            multiply_pair<ROWS, PANELS>(x + j, k, weights, acc);
        }
    }
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) finish<ROWS>(tile, tile.panel + p, row, acc[p]);
}

// The same from quantized panels, few rows: weights are decoded in registers and used at once.
template <class Columns, int FORMAT, int ROWS, int PANELS>
inline __attribute__((always_inline)) void run_decoding(const Tile& tile, int row) {
    const int k = tile.job.weight->k;
    const size_t stored = panel_bytes(FORMAT, k);
    const bf16* x = tile.job.x + static_cast<size_t>(row) * k;
    __m512 acc[PANELS][ROWS][2] = {};
    const uint8_t *group = tile.panels, *ahead = tile.ahead;
    for (int k0 = 0; k0 < k; k0 += kGroup, group += group_bytes(FORMAT), ahead += group_bytes(FORMAT)) {
        Columns columns[PANELS][2];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; ++p) {
            prefetch_group(ahead + p * stored, FORMAT);
            columns[p][0].start(group + p * stored, 0);
            columns[p][1].start(group + p * stored, 1);
        }
        for (int k16 = 0; k16 < 2; ++k16) {
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; ++p) {
                columns[p][0].load(group + p * stored, 0, k16);
                columns[p][1].load(group + p * stored, 1, k16);
            }
#pragma GCC unroll 2
            for (int pair = 0; pair < 8; ++pair) {
                __m512bh weights[PANELS][2];
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; ++p) {
                    weights[p][0] = columns[p][0].next();
                    weights[p][1] = columns[p][1].next();
                }
                multiply_pair<ROWS, PANELS>(x + k0 + k16 * 16 + pair * 2, k, weights, acc);
            }
        }
    }
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) finish<ROWS>(tile, tile.panel + p, row, acc[p]);
}

constexpr int kFusedRows = 8;  // more rows than that: decode into cache first, the registers are needed for sums

// Decodes a whole panel for tiles of many rows.
template <class Columns, int FORMAT>
void decode_panel(const Tile& tile) {
    const uint8_t *group = tile.panels, *ahead = tile.ahead;
    for (int k0 = 0; k0 < tile.job.weight->k;
         k0 += kGroup, group += group_bytes(FORMAT), ahead += group_bytes(FORMAT)) {
        prefetch_group(ahead, FORMAT);
        decode_group<Columns>(tile.decoded + static_cast<size_t>(k0) * kPanel, group);
    }
}

template <int FORMAT, int ROWS, int PANELS>
void run_tile(const Tile& tile, int row) {
    if constexpr (FORMAT == kQ4)
        run_decoding<Q4Columns, kQ4, ROWS, PANELS>(tile, row);
    else if constexpr (FORMAT == kQ8)
        run_decoding<Q8Columns, kQ8, ROWS, PANELS>(tile, row);
    else
        run_plain<ROWS, PANELS>(tile, reinterpret_cast<const bf16*>(tile.panels), row);
}

using TileFunction = void (*)(const Tile&, int);
template <int FORMAT, int PANELS, int... ROWS>
constexpr std::array<TileFunction, sizeof...(ROWS) + 1> tiles_of(std::integer_sequence<int, ROWS...>) {
    return {nullptr, run_tile<FORMAT, ROWS + 1, PANELS>...};
}
template <int FORMAT>
struct Tiles {
    static constexpr auto kWide = tiles_of<FORMAT, 2>(std::make_integer_sequence<int, kWideRows>{});
    static constexpr auto kSingle =
        tiles_of<FORMAT, 1>(std::make_integer_sequence<int, FORMAT == kBf16 ? kTileRows : kFusedRows>{});
};

TileFunction tile_function(int format, int rows, bool wide) {
    if (format == kQ4) return wide ? Tiles<kQ4>::kWide[rows] : Tiles<kQ4>::kSingle[rows];
    if (format == kQ8) return wide ? Tiles<kQ8>::kWide[rows] : Tiles<kQ8>::kSingle[rows];
    return wide ? Tiles<kBf16>::kWide[rows] : Tiles<kBf16>::kSingle[rows];
}

// How a product is cut into items: slabs of rows times runs of panels.
struct Cut {
    int panels, run, runs, slab;
    Cut(const Linear& weight, int m)
        : panels(num_panels(weight.n)), run(m <= kWideRows ? 2 : 1), runs((panels + run - 1) / run) {
        const int fit = static_cast<int>(kSlabBytes / (static_cast<size_t>(weight.k) * sizeof(bf16)));
        const int most = std::max(kTileRows, fit / kTileRows * kTileRows), slabs = std::max(1, (m + most - 1) / most);
        slab = std::max(1, std::min(m, ((m + slabs - 1) / slabs + kTileRows - 1) / kTileRows * kTileRows));
    }
    int items(int m) const { return (m + slab - 1) / slab * runs; }
    int first_panel(int item) const { return item % runs * run; }
};

}  // namespace

int gemm_items(const Linear& weight, int m) { return Cut(weight, m).items(m); }

const uint8_t* first_panel(const Linear& weight, int m, int thread, int threads) {
    const Cut cut(weight, m);
    const Form& form = weight.form(m);
    const int item = Phases::share_begin(cut.items(m), thread, threads);
    return form.panels + cut.first_panel(item) * panel_bytes(form.format, weight.k);
}

void gemm(Phases& phases, int thread, const GemmJob& job, bf16* scratch) {
    const Linear& weight = *job.weight;
    const Form& form = weight.form(job.m);
    const size_t bytes = panel_bytes(form.format, weight.k);
    const Cut cut(weight, job.m);
    for (int item; (item = phases.claim(thread)) >= 0;) {
        const int next = phases.peek(thread);  // its weights are fetched meanwhile
        const int panel = cut.first_panel(item), begin = item / cut.runs * cut.slab;
        const bool wide = cut.run == 2 && panel + 1 < cut.panels;
        const uint8_t* packed = form.panels + panel * bytes;
        const uint8_t* ahead = next < 0 ? job.next_phase : form.panels + cut.first_panel(next) * bytes;
        if (!ahead) ahead = packed;  // nothing to fetch: lines that are here already
        const int end = std::min(begin + cut.slab, job.m), tiles = (end - begin + kTileRows - 1) / kTileRows;
        Tile tile{job, packed, scratch, panel, ahead, 0};
        int format = form.format;
        if (format != kBf16 && end - begin > kFusedRows) {
            format == kQ4 ? decode_panel<Q4Columns, kQ4>(tile) : decode_panel<Q8Columns, kQ8>(tile);
            tile.panels = reinterpret_cast<const uint8_t*>(scratch);
            format = kBf16;
        } else if (format == kBf16) {
            // Many tiles read a panel once from DRAM and then from cache: fetching the next one meanwhile keeps DRAM
            // busy. A single tile streams, which the hardware's own prefetching does better (6 ms a step against 6.6).
            const int lines = ((wide ? 2 : 1) * kGroup + tiles - 1) / tiles;  // a panel has one line per k
            tile.ahead_lines = tiles > 1 || next < 0 ? lines : 0;
        }
        for (int i = 0, row = begin; i < tiles; ++i) {  // rows spread evenly: 32 is 11 + 11 + 10, not 12 + 12 + 8
            const int rows = (end - row + tiles - i - 1) / (tiles - i);
            tile_function(format, rows, wide)(tile, row);
            tile.ahead += static_cast<size_t>(tile.ahead_lines) * 64 * (weight.k / kGroup);
            row += rows;
        }
    }
}

}  // namespace ns

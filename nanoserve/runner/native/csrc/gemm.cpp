#include "gemm.h"

#include <algorithm>
#include <array>
#include <utility>

#include "decode.h"
#include "epilogue.h"
#include "gemm_integer.h"

namespace ns {
namespace {

// Rows of x in one register tile: 12 x 2 accumulators, 2 weights and a broadcast fill 27 of the 32 registers.
constexpr int kTileRows = 12;
// x rows that stay in the L2 cache while weights stream past them.
constexpr size_t kSlabBytes = 480 << 10;

// The places in ROWS rows of x, a pointer for three rows: with one for each there are not enough registers for what is
// fetched on the way, too.
struct RowPlaces {
    const bf16 *row0, *row3, *row6, *row9;
    size_t stride;
    RowPlaces(const bf16* x, size_t k) : row0(x), row3(x + 3 * k), row6(x + 6 * k), row9(x + 9 * k), stride(k) {}
    inline __attribute__((always_inline)) const bf16* operator[](int row) const {
        const bf16* third = row < 3 ? row0 : row < 6 ? row3 : row < 9 ? row6 : row9;
        return third + row % 3 * stride;
    }
    inline __attribute__((always_inline)) void advance() {
        row0 += 2, row3 += 2, row6 += 2, row9 += 2;
        asm("" : "+r"(row0), "+r"(row3), "+r"(row6), "+r"(row9), "+r"(stride));  // else gcc makes one of each row again
    }
};

template <int ROWS>
inline __attribute__((always_inline)) void multiply_pair(RowPlaces& x, __m512bh low, __m512bh high,
                                                         __m512 (&acc)[ROWS][2]) {
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
        const __m512bh pair = broadcast_pair(x[i]);
        acc[i][0] = _mm512_dpbf16_ps(acc[i][0], low, pair);
        acc[i][1] = _mm512_dpbf16_ps(acc[i][1], high, pair);
    }
    x.advance();
}

// ROWS rows by a panel's 32 columns over the whole of K, in the kBf16 form. Each accumulator takes its products in order
// of k whatever the tile: the same row gives the same bits in every batch. All loops over accumulators are unrolled by
// force, else gcc keeps them in memory (35-43 % of peak instead of 90).
template <int ROWS>
void run_plain(const ProductTile& tile, int row) {
    const int k = tile.job.weight->k;
    RowPlaces x(tile.job.x + static_cast<size_t>(row) * k, k);
    const bf16* w = reinterpret_cast<const bf16*>(tile.packed);
    const uint8_t* ahead = tile.ahead;
    __m512 acc[ROWS][2] = {};
    prefetch_logits<ROWS>(tile, row);
    KvPieces kv = tile.kv;
    for (int k0 = 0; k0 < k; k0 += kGroup) {
        Lines weights = Lines::of(ahead, tile.ahead_lines), pages = kv.next();
        ahead = weights.end;
        for (int pair = 0; pair < kFetchSteps; ++pair, w += 2 * kPanel) {
            weights.fetch_one();
            pages.fetch_one();
            multiply_pair<ROWS>(x, load_pairs(w), load_pairs(w + kPanel), acc);
        }
        weights.fetch_rest();
    }
    finish<ROWS>(tile, row, acc);
}

// The same from quantized panels, few rows: weights are decoded in registers and used at once.
template <class Columns, int FORMAT, int ROWS>
void run_decoding(const ProductTile& tile, int row) {
    const int k = tile.job.weight->k;
    RowPlaces x(tile.job.x + static_cast<size_t>(row) * k, k);
    __m512 acc[ROWS][2] = {};
    const uint8_t *group = tile.packed, *ahead = tile.ahead;
    KvPieces kv = tile.kv;
    for (int k0 = 0; k0 < k; k0 += kGroup, group += group_bytes(FORMAT), ahead += group_bytes(FORMAT)) {
        Lines weights = Lines::of(ahead, group_bytes(FORMAT) / kLine), pages = kv.next();
        Columns low, high;
        low.start(group, 0);
        high.start(group, 1);
        for (int k16 = 0; k16 < 2; ++k16) {
            low.load(group, 0, k16);
            high.load(group, 1, k16);
#pragma GCC unroll 2
            for (int pair = 0; pair < 8; ++pair) {
                weights.fetch_one();
                pages.fetch_one();
                multiply_pair<ROWS>(x, low.next(), high.next(), acc);
            }
        }
        weights.fetch_rest();
    }
    finish<ROWS>(tile, row, acc);
}

constexpr int kFusedRows = 8;  // more rows than that: decode into cache first, the registers are needed for sums

// Decodes a whole panel for tiles of many rows.
template <class Columns, int FORMAT>
void decode_panel(const ProductTile& tile) {
    const uint8_t *group = tile.packed, *ahead = tile.ahead;
    for (int k0 = 0; k0 < tile.job.weight->k;
         k0 += kGroup, group += group_bytes(FORMAT), ahead += group_bytes(FORMAT)) {
        Lines::of(ahead, group_bytes(FORMAT) / kLine).fetch_rest();
        decode_group<Columns>(tile.decoded + static_cast<size_t>(k0) * kPanel, group);
    }
}

template <int FORMAT, int ROWS>
void run_tile(const ProductTile& tile, int row) {
    if constexpr (FORMAT == kQ4)
        run_decoding<Q4Columns, kQ4, ROWS>(tile, row);
    else if constexpr (FORMAT == kQ8)
        run_decoding<Q8Columns, kQ8, ROWS>(tile, row);
    else
        run_plain<ROWS>(tile, row);
}

template <int FORMAT, int... ROWS>
constexpr std::array<TileFunction, sizeof...(ROWS) + 1> tiles_of(std::integer_sequence<int, ROWS...>) {
    return {nullptr, run_tile<FORMAT, ROWS + 1>...};
}
template <int FORMAT>
constexpr auto kTiles = tiles_of<FORMAT>(std::make_integer_sequence<int, FORMAT == kBf16 ? kTileRows : kFusedRows>{});

TileFunction tile_function(int format, int rows) {
    if (is_integer(format)) return integer_tile_function(format, rows);
    return format == kQ4 ? kTiles<kQ4>[rows] : format == kQ8 ? kTiles<kQ8>[rows] : kTiles<kBf16>[rows];
}

// How a product is cut into items: slabs of rows times panels. Two panels side by side would keep the core busier where
// a row or two make one chain of dependent additions per column, but memory is the bound there, and pairs are shared out
// less evenly: 2.48 ms a step of one row against 2.24.
struct Cut {
    int panels, slab, tile_rows;
    Cut(const Linear& weight, int m)
        : panels(num_panels(weight.n)), tile_rows(is_integer(weight.form(m).format) ? kIntegerTileRows : kTileRows) {
        const int fit = static_cast<int>(kSlabBytes / (static_cast<size_t>(weight.k) * sizeof(bf16)));
        const int most = std::max(kTileRows, fit / kTileRows * kTileRows), slabs = std::max(1, (m + most - 1) / most);
        slab = std::max(1, (m + slabs - 1) / slabs);  // even: else threads help each other, and rows change caches
    }
    int items(int m) const { return (m + slab - 1) / slab * panels; }
};

}  // namespace

int gemm_items(const Linear& weight, int m) { return Cut(weight, m).items(m); }

const uint8_t* first_panel(const Linear& weight, int m, int thread, int threads) {
    const Cut cut(weight, m);
    const Form& form = weight.form(m);
    const int item = Phases::share_begin(cut.items(m), thread, threads);
    return form.panels + item % cut.panels * panel_bytes(form.format, weight.k);
}

void gemm(Phases& phases, int thread, const GemmJob& job, bf16* scratch) {
    const Linear& weight = *job.weight;
    const Form& form = weight.form(job.m);
    const size_t bytes = panel_bytes(form.format, weight.k);
    const Cut cut(weight, job.m);
    for (int item; (item = phases.claim(thread)) >= 0;) {
        const int next = phases.peek(thread);  // its weights are fetched meanwhile
        const int panel = item % cut.panels, begin = item / cut.panels * cut.slab;
        const uint8_t* packed = form.panels + panel * bytes;
        const uint8_t* ahead = next < 0 ? job.next_phase : form.panels + next % cut.panels * bytes;
        if (!ahead) ahead = packed;  // nothing to fetch: lines that are here already
        const int end = std::min(begin + cut.slab, job.m), tiles = (end - begin + cut.tile_rows - 1) / cut.tile_rows;
        KvShare kv(job.kv_ahead, item, phases.share_of_claimed(thread));
        ProductTile tile{job, packed, scratch, panel, ahead};
        int format = form.format;
        const int lines = (static_cast<int>(group_bytes(format) / kLine) + tiles - 1) / tiles;
        if (is_integer(format)) {
            tile.ahead_lines = lines;
        } else if (format != kBf16 && end - begin > kFusedRows) {
            format == kQ4 ? decode_panel<Q4Columns, kQ4>(tile) : decode_panel<Q8Columns, kQ8>(tile);
            tile.packed = reinterpret_cast<const uint8_t*>(scratch);
            format = kBf16;
        } else if (format == kBf16) {
            // Many tiles read a panel once from DRAM and then from cache: fetching the next one meanwhile keeps DRAM
            // busy. A single tile streams, which the hardware's own prefetching does better (6 ms a step against 6.6).
            tile.ahead_lines = tiles > 1 || next < 0 ? lines : 0;
        }
        for (int i = 0, row = begin; i < tiles; ++i) {  // rows spread evenly: 32 is 11 + 11 + 10, not 12 + 12 + 8
            const int rows = (end - row + tiles - i - 1) / (tiles - i);
            tile.kv = kv.take(tiles - i, weight.k / kGroup);
            tile_function(format, rows)(tile, row);
            tile.ahead += static_cast<size_t>(tile.ahead_lines) * kLine * (weight.k / kGroup);
            if (tile.ahead >= ahead + bytes) tile.ahead_lines = 0;
            row += rows;
        }
    }
}

}  // namespace ns

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

template <int ROWS>
inline __attribute__((always_inline)) void multiply_pair(const bf16* x, int k, __m512bh low, __m512bh high,
                                                         __m512 (&acc)[ROWS][2]) {
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
        const __m512bh pair = broadcast_pair(x + static_cast<size_t>(i) * k);
        acc[i][0] = _mm512_dpbf16_ps(acc[i][0], low, pair);
        acc[i][1] = _mm512_dpbf16_ps(acc[i][1], high, pair);
    }
}

// ROWS rows by a panel's 32 columns over the whole of K, in the kBf16 form. Each accumulator takes its products in order
// of k whatever the tile: the same row gives the same bits in every batch. All loops over accumulators are unrolled by
// force, else gcc keeps them in memory (35-43 % of peak instead of 90).
template <int ROWS>
void run_plain(const ProductTile& tile, int row) {
    const int k = tile.job.weight->k;
    const bf16* x = tile.job.x + static_cast<size_t>(row) * k;
    const bf16* w = reinterpret_cast<const bf16*>(tile.packed);
    const uint8_t* ahead = tile.ahead;
    __m512 acc[ROWS][2] = {};
    prefetch_logits<ROWS>(tile, row);
    for (int k0 = 0; k0 < k; k0 += kGroup) {
        for (int line = 0; line < tile.ahead_lines; ++line, ahead += 64) prefetch(ahead);
        fetch_kv(tile, k0);
        for (int j = k0; j < k0 + kGroup; j += 2, w += 2 * kPanel)
            multiply_pair<ROWS>(x + j, k, load_pairs(w), load_pairs(w + kPanel), acc);
    }
    finish<ROWS>(tile, row, acc);
}

// The same from quantized panels, few rows: weights are decoded in registers and used at once.
template <class Columns, int FORMAT, int ROWS>
void run_decoding(const ProductTile& tile, int row) {
    const int k = tile.job.weight->k;
    const bf16* x = tile.job.x + static_cast<size_t>(row) * k;
    __m512 acc[ROWS][2] = {};
    const uint8_t *group = tile.packed, *ahead = tile.ahead;
    for (int k0 = 0; k0 < k; k0 += kGroup, group += group_bytes(FORMAT), ahead += group_bytes(FORMAT)) {
        prefetch_group(ahead, FORMAT);
        fetch_kv(tile, k0);
        Columns low, high;
        low.start(group, 0);
        high.start(group, 1);
        for (int k16 = 0; k16 < 2; ++k16) {
            low.load(group, 0, k16);
            high.load(group, 1, k16);
#pragma GCC unroll 2
            for (int pair = 0; pair < 8; ++pair)
                multiply_pair<ROWS>(x + k0 + k16 * 16 + pair * 2, k, low.next(), high.next(), acc);
        }
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
        prefetch_group(ahead, FORMAT);
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
        slab = std::max(1, std::min(m, ((m + slabs - 1) / slabs + kTileRows - 1) / kTileRows * kTileRows));
    }
    int items(int m) const { return (m + slab - 1) / slab * panels; }
};

// A product's KV pages, shared evenly over its tiles.
class KvShare {
 public:
    KvShare(const KvPages& kv, int item, int items, int k)
        : kv_(kv), next_(share_of(item, items)), end_(share_of(item + 1, items)) {
        const int lines = static_cast<int>(kv.page_bytes / 64), groups = k / kGroup;
        lines_ = (lines + groups - 1) / groups;
    }
    // To one of the item's tiles of which `left`, this one included, are still to come.
    void give(ProductTile& tile, int left) {
        const int count = (end_ - next_ + left - 1) / left;
        tile.num_kv_pages = std::min(count, kMostPages);
        tile.kv_lines = lines_;
        for (int i = 0; i < tile.num_kv_pages; ++i)
            tile.kv_pages[i] = kv_.layer + kv_.pages[next_ + i] * kv_.page_bytes;
        next_ += count;
    }

 private:
    int share_of(int item, int items) const { return Phases::share_begin(kv_.count, item, items); }
    const KvPages& kv_;
    int next_, end_, lines_ = 0;
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
        KvShare kv(job.kv_ahead, item, cut.items(job.m), weight.k);
        ProductTile tile{job, packed, scratch, panel, ahead};
        int format = form.format;
        const int lines = (static_cast<int>(group_bytes(format) / 64) + tiles - 1) / tiles;
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
            kv.give(tile, tiles - i);
            tile_function(format, rows)(tile, row);
            tile.ahead += static_cast<size_t>(tile.ahead_lines) * 64 * (weight.k / kGroup);
            if (tile.ahead >= ahead + bytes) tile.ahead_lines = 0;
            row += rows;
        }
    }
}

}  // namespace ns

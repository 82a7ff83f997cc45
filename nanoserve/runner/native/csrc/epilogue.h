// What every product's tile shares: what it fetches on the way, and what becomes of its sums.
#pragma once
#include <algorithm>

#include "gemm.h"
#include "rotate.h"

namespace ns {

struct ProductTile {
    const GemmJob& job;
    const uint8_t* packed;  // the panel as stored
    bf16* decoded;          // where a quantized panel goes in the kBf16 form, for the tiles after the first
    int panel;              // its index
    const uint8_t* ahead;   // fetched evenly over the tile
    int ahead_lines = 0;    // of it, per 32 k
    KvPieces kv = {};       // one for each 32 k, as long as there are any
};

using TileFunction = void (*)(const ProductTile&, int row);

template <int ROWS>
inline __attribute__((always_inline)) void finish_logits(const ProductTile& tile, int row, __m512 (&acc)[ROWS][2]) {
    const GemmJob& job = tile.job;
    const int column = tile.panel * kPanel;
    const int live = std::min(kPanel, job.weight->n - column);
    const __mmask16 mask0 = static_cast<__mmask16>((1u << std::min(live, 16)) - 1);
    const __mmask16 mask1 = static_cast<__mmask16>((1u << std::max(live - 16, 0)) - 1);
    const __m512 nothing = _mm512_set1_ps(-kInfinity);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
        if (job.out) {
            float* out = static_cast<float*>(job.out) + static_cast<size_t>(row + i) * job.ld + column;
            _mm512_mask_storeu_ps(out, mask0, acc[i][0]);
            _mm512_mask_storeu_ps(out + 16, mask1, acc[i][1]);
        }
        const __m512 low = _mm512_mask_blend_ps(mask0, nothing, acc[i][0]);
        const __m512 high = _mm512_mask_blend_ps(mask1, nothing, acc[i][1]);
        Best& best = job.best[row + i];
        if (_mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q)) {  // one of them is no number, which a maximum would pass over
            best = {kInfinity, column};
            continue;
        }
        const float top = _mm512_reduce_max_ps(_mm512_max_ps(low, high));
        if (top < best.value) continue;
        const uint32_t where = _mm512_cmpeq_ps_mask(low, _mm512_set1_ps(top)) |
                               static_cast<uint32_t>(_mm512_cmpeq_ps_mask(high, _mm512_set1_ps(top))) << 16;
        const int index = column + __builtin_ctz(where);
        if (top > best.value || index < best.index) best = {top, index};  // ties: the lowest id, whoever came first
    }
}

template <int ROWS>
inline __attribute__((always_inline)) void finish(const ProductTile& tile, int row, __m512 (&acc)[ROWS][2]) {
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
    alignas(64) float columns[ROWS * kPanel];
    const bool rotates = job.epilogue == Epilogue::kRotate;
    const int ld = rotates ? kPanel : job.ld;
    float* out = rotates ? columns : static_cast<float*>(job.out) + static_cast<size_t>(row) * ld + tile.panel * kPanel;
    __m512 base0 = _mm512_setzero_ps(), base1 = _mm512_setzero_ps();
    if (job.weight->bias) {
        base0 = _mm512_loadu_ps(job.weight->bias + tile.panel * kPanel);
        base1 = _mm512_loadu_ps(job.weight->bias + tile.panel * kPanel + 16);
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i, out += ld) {
        __m512 low = _mm512_add_ps(acc[i][0], base0), high = _mm512_add_ps(acc[i][1], base1);
        if (job.epilogue == Epilogue::kAdd) {
            low = _mm512_add_ps(low, _mm512_loadu_ps(out));
            high = _mm512_add_ps(high, _mm512_loadu_ps(out + 16));
        }
        _mm512_storeu_ps(out, low);
        _mm512_storeu_ps(out + 16, high);
    }
    if (rotates) job.rotation->write_panel(tile.panel, row, ROWS, columns);
}

// Fetches, to be written, where the tile's logits go: lines that nobody has touched since the last step.
template <int ROWS>
inline __attribute__((always_inline)) void prefetch_logits(const ProductTile& tile, int row) {
    if (tile.job.epilogue != Epilogue::kLogits || !tile.job.out) return;
    const float* out = static_cast<float*>(tile.job.out) + static_cast<size_t>(row) * tile.job.ld + tile.panel * kPanel;
    for (int i = 0; i < ROWS; ++i, out += tile.job.ld) {
        __builtin_prefetch(out, 1);
        __builtin_prefetch(out + 16, 1);
    }
}

}  // namespace ns

// What becomes of queries, keys and values once they are computed: norms of heads, rotary embedding (Su et al. 2021), and
// the way to where attention reads them.
//
// A head of queries or keys leaves the product in an order that puts what is rotated together into one panel: 16 values
// of its first half, then those 16 of its second half, then the next 16 of each (packing.py). So a panel can be rotated
// while it is still in registers, unless a norm or a scale needs the whole head.
#pragma once
#include "kv.h"
#include "model.h"

namespace ns {

struct Rotation {
    const NsLayer& layer;
    const AttentionShape& shape;
    const int* positions;          // per token
    const int* const* page_table;  // per token that of its row
    uint8_t* kv;                   // the layer's memory
    bf16* queries;                 // [tokens, heads, head_dim], scaled by log2(e)/sqrt(d)
    float query_scale, norm_eps;

    // Whether a panel holds all that its rotation needs.
    bool by_panel() const { return !layer.q_norm && shape.kv_format == kKvBf16; }
    // A panel's columns of tokens first..first+count-1: `sums` is [count, kPanel], and room to work in.
    void write_panel(int panel, int first, int count, float* sums) const;
    // A kv head of one token, and the query heads that read it; `row`: the token's columns of the product.
    void write_head(int kv_head, int token, const float* row) const;

 private:
    uint8_t* head_page(int token, int kv_head) const {
        const int page = page_table[token][positions[token] / kPageTokens];
        return kv + page * shape.page() + kv_head * shape.head_page();
    }
    int neighbours(int token, int most) const;
    int slot(int token) const { return positions[token] % kPageTokens; }
    template <class Write>
    void turn(int token, const float* source, int begin, int end, Write write) const;
};

}  // namespace ns

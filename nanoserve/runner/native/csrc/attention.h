// Paged attention in place, for prefill tiles and single decode rows alike.
//
// KV layout of one page (16 tokens) in a layer: [kv head][ K: d/2 x 16 tokens x 2 | V: 8 token pairs x d x 2 ].
// Scores then need no horizontal sums and both products are vdpbf16ps; a head's K and V are one contiguous run.
//
// A context is cut into segments of 256 tokens at fixed positions. Each segment gives (max, sum, weighted V) on its
// own, and segments are merged in order. Which thread did which segment, and in what tile a row came, changes nothing
// in the order of a row's arithmetic: results are the same bits alone, in any batch and in any chunk.
#pragma once
#include <vector>

#include "simd.h"

namespace ns {

constexpr int kMaxHeadDim = 1024;
constexpr int kPageTokens = 16;
constexpr int kSegmentPages = 16;
constexpr int kSegmentTokens = kPageTokens * kSegmentPages;

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim;
    int group() const { return num_heads / num_kv_heads; }
    size_t head_page() const { return static_cast<size_t>(2) * kPageTokens * head_dim; }  // bf16 values, K and V
    size_t page() const { return head_page() * num_kv_heads; }
};

// Neighbouring tokens of one row that share K and V reads. Positions first_position .. + num_tokens - 1.
struct Tile {
    int first_token;  // index into the flat token arrays
    int num_tokens;
    int first_position;
    const int* pages;  // the row's page table
    int segment_begin(int window) const {
        const int oldest = window > 0 ? first_position - window + 1 : 0;
        return oldest > 0 ? oldest / kSegmentTokens : 0;
    }
    int segment_end() const { return (first_position + num_tokens - 1) / kSegmentTokens + 1; }
};

// The most tokens in a prefill tile: about 48 query rows for one read of K and V.
inline int tile_tokens(const AttentionShape& shape) {
    const int tokens = 48 / shape.group();
    return tokens < 1 ? 1 : tokens;
}

struct Partial {    // for n query rows; unnormalized
    float* max;     // [n], base-2 exponent scale
    float* sum;     // [n]
    float* values;  // [n, head_dim]
};

// Memory of one thread: scores, probabilities, packed queries and two partials.
class AttentionScratch {
 public:
    explicit AttentionScratch(const AttentionShape& shape);
    float* scores;  // [rows, kSegmentTokens]
    bf16* probs;    // [rows, kSegmentTokens]
    bf16* queries;  // [rows, head_dim]
    Partial running, current;

 private:
    std::vector<uint8_t> memory_;
};

// Attention of one tile and kv head over one segment. `queries` are [num_tokens, num_heads, head_dim], already scaled
// by log2(e)/sqrt(d); `layer` is the layer's KV memory. `ahead` (or null) is a tile and `ahead_segment` its segment to
// prefetch.
void attend_segment(const AttentionShape& shape, int window, const bf16* queries, const bf16* layer, const Tile& tile,
                    int kv_head, int segment, const Tile* ahead, int ahead_kv_head, int ahead_segment,
                    AttentionScratch& scratch, const Partial& result);
// running = running merged with the later segment `next`.
void merge(const Partial& running, const Partial& next, int rows, int head_dim);
// bf16 values / sum into `out` [num_tokens, num_heads, head_dim].
void finish_attention(const AttentionShape& shape, const Partial& total, const Tile& tile, int kv_head, bf16* out);
// Keys and values of one token into its page; not-finite values become 0 so that they cannot reach other rows by 0 *
// NaN.
void write_kv(const AttentionShape& shape, bf16* layer, int page, int slot, int kv_head, const float* key,
              const float* value);

}  // namespace ns

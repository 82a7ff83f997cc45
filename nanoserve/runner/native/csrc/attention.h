// Paged attention in place (kv.h), for prefill tiles and single decode rows alike.
//
// A context is cut into segments of 256 tokens at fixed positions. Each segment gives (max, sum, weighted V) on its
// own, and segments are merged in order. Which thread did which segment, and in what tile a row came, changes nothing
// in the order of a row's arithmetic: results are the same bits alone, in any batch and in any chunk.
#pragma once
#include <vector>

#include "kv.h"

namespace ns {

constexpr int kSegmentPages = 16;
constexpr int kSegmentTokens = kPageTokens * kSegmentPages;

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
    float* max;     // [n], a whole power of two that no score is above: merging then scales exactly
    float* sum;     // [n]
    float* values;  // [n, head_dim]
};

// Memory of one thread: the packed queries of a tile, two partials for all its rows, and for the few rows that go
// through a segment together their scores and probabilities, and unpacked int8 keys and values.
class AttentionScratch {
 public:
    explicit AttentionScratch(const AttentionShape& shape);
    float* scores;  // [kBlockRows, kSegmentTokens]
    bf16* probs;    // [kBlockRows, kSegmentTokens]
    bf16* queries;  // [rows, head_dim], in the order of pack_queries
    bf16 *keys, *values;  // [kSegmentPages, 16 * head_dim] each with kKvInt8
    Partial running, current;

 private:
    std::vector<uint8_t> memory_;
};

// What to prefetch while a segment is worked on: a segment of a tile and kv head, or none.
struct Ahead {
    const Tile* tile = nullptr;
    int kv_head = 0, segment = 0;
};

// Brings the queries of a tile and kv head into scratch, in the order that attend_segment reads them. `queries` are
// [num_tokens, num_heads, head_dim], already scaled by log2(e)/sqrt(d).
void pack_queries(const AttentionShape& shape, const bf16* queries, const Tile& tile, int kv_head,
                  AttentionScratch& scratch);
// Attention of the packed tile and kv head over one segment. `layer` is the layer's KV memory.
void attend_segment(const AttentionShape& shape, int window, const uint8_t* layer, const Tile& tile, int kv_head,
                    int segment, const Ahead& ahead, AttentionScratch& scratch, const Partial& result);
// running = running merged with the later segment `next`.
void merge(const Partial& running, const Partial& next, int rows, int head_dim);
// bf16 values / sum into `out` [num_tokens, num_heads, head_dim].
void finish_attention(const AttentionShape& shape, const Partial& total, const Tile& tile, int kv_head, bf16* out);

}  // namespace ns

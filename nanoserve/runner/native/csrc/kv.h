// The KV memory: how keys and values lie in it, how they get in, and how attention reads them.
//
// One page (16 tokens) of a layer is [kv head][ K | V | scales ], so a head's part of it is one contiguous run.
// kKvBf16: K is d/2 x 16 tokens x 2, V is 8 token pairs x d x 2: scores need no horizontal sums, and both products are
//   vdpbf16ps. No scales.
// kKvInt8: the same order at a byte a value, then float32 scales of the 16 keys and of the 16 values: largest |x| / 127
//   over a token's head. Attention works on the integers, which bf16 holds exactly, and scales scores and
//   probabilities instead. A byte is sign and magnitude, and 64 of them are two bf16 vectors in the order that
//   unpacking bytes within 128-bit lanes gives back (kv.cpp).
#pragma once
#include "simd.h"

namespace ns {

constexpr int kMaxHeadDim = 1024;
constexpr int kPageTokens = 16;

enum KvFormat { kKvBf16 = 0, kKvInt8 = 1 };

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim, kv_format;
    int group() const { return num_heads / num_kv_heads; }
    size_t page_values() const { return static_cast<size_t>(kPageTokens) * head_dim; }  // of K or V, one head
    // Bytes of one head in a page, and of a whole page of one layer.
    size_t head_page() const {
        return kv_format == kKvInt8 ? 2 * page_values() + 2 * kPageTokens * sizeof(float) : 4 * page_values();
    }
    size_t page() const { return head_page() * num_kv_heads; }
};

// Key and value [head_dim] of one token and head into its page. Not-finite parts of a value become 0, so that they
// cannot reach other rows by 0 * NaN; a not-finite key makes that token's scores NaN, and only rows that see it.
void write_kv(const AttentionShape& shape, uint8_t* head_page, int slot, const float* key, const float* value);

// The same for sixteen dimensions from `d` on of the bf16 keys or values of `count` neighbouring tokens. `rows`: theirs,
// `stride` floats from one to the next.
void write_key_parts(uint8_t* head_page, int slot, int count, int d, const float* rows, int stride);
void write_value_parts(const AttentionShape& shape, uint8_t* head_page, int slot, int count, int d, const float* rows,
                       int stride);

// One head's int8 K or V of a page as bf16 integers in the order of kKvBf16. A line of the same page further on in
// memory, `ahead` (of K or V), is fetched per line read.
void unpack_page(const AttentionShape& shape, const uint8_t* packed, const uint8_t* ahead, bf16* out);

inline const float* key_scales(const AttentionShape& shape, const uint8_t* head_page) {
    return reinterpret_cast<const float*>(head_page + 2 * shape.page_values());
}
inline const float* value_scales(const AttentionShape& shape, const uint8_t* head_page) {
    return key_scales(shape, head_page) + kPageTokens;
}

}  // namespace ns

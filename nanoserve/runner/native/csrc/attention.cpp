#include "attention.h"

#include <cmath>

#include "attention_kernels.h"

namespace ns {
namespace {

static_assert(kScoreStride == kSegmentTokens);

constexpr float kNone = -1.0e30f;  // the maximum of no scores

// Query rows that go through a segment together: all rows of a tile in pieces of nearly equal size.
struct Block {
    int row, rows;
};

template <class Body>
void each_block(int rows, Body body) {
    for (int row = 0, parts = (rows + kBlockRows - 1) / kBlockRows; parts > 0; --parts) {
        const Block block{row, (rows - row + parts - 1) / parts};
        body(block);
        row += block.rows;
    }
}

// The pages of one segment for one kv head. bf16 is read where it lies; int8 is unpacked once, when it is needed.
class SegmentPages {
 public:
    SegmentPages(const AttentionShape& shape, const uint8_t* layer, const Tile& tile, int kv_head, int segment,
                 const Ahead& ahead, AttentionScratch& scratch)
        : shape_(shape), packed_(shape.kv_format == kKvInt8) {
        const int first = segment * kSegmentPages;
        const int last = (tile.first_position + tile.num_tokens - 1) / kPageTokens;
        const int ahead_end = ahead.tile ? (ahead.tile->first_position + ahead.tile->num_tokens - 1) / kPageTokens : -1;
        const size_t values = shape.page_values() * (packed_ ? 1 : sizeof(bf16));
        const bool few = tile.num_tokens * shape.group() <= kBlockRows;  // keys are read once, and then room is reused
        for (int i = 0; i < kCount; ++i) {  // the last page again as padding: its scores are not used
            const int page = std::min(first + std::min(i, kSegmentPages - 1), last);
            const int next = ahead.segment * kSegmentPages + i;
            head_[i] = layer + tile.pages[page] * shape.page() + kv_head * shape.head_page();
            later_[i] = next > ahead_end ? head_[i]
                                         : layer + ahead.tile->pages[next] * shape.page() +
                                               ahead.kv_head * shape.head_page();
            keys[i] = reinterpret_cast<const bf16*>(head_[i]);
            this->values[i] = reinterpret_cast<const bf16*>(head_[i] + values);
            later_keys[i] = reinterpret_cast<const bf16*>(later_[i]);
            later_values[i] = reinterpret_cast<const bf16*>(later_[i] + values);
            if (!packed_) continue;
            const int kept = std::min(i, kSegmentPages - 1);
            keys[i] = scratch.keys + (few ? i % 4 : kept) * shape.page_values();
            this->values[i] = scratch.values + kept * shape.page_values();
            key_scales[i] = ns::key_scales(shape, head_[i]);
            value_scales[i] = ns::value_scales(shape, head_[i]);
        }
    }

    bool packed() const { return packed_; }

    // Pages begin..end-1 will be read. Begins and ends do not go back from call to call.
    void need_keys(int begin, int end) {
        for (int i = std::max(begin, keys_end_); packed_ && i < std::min(end, kSegmentPages); keys_end_ = ++i)
            unpack_page(shape_, head_[i], later_[i], const_cast<bf16*>(keys[i]));
    }
    void need_values(int begin, int end) {
        for (int i = std::max(begin, values_end_); packed_ && i < end; values_end_ = ++i) {
            const size_t offset = shape_.page_values();
            unpack_page(shape_, head_[i] + offset, later_[i] + offset, const_cast<bf16*>(values[i]));
            for (int line = 0; line < 128; line += 64) prefetch(later_[i] + 2 * offset + line);  // the scales
        }
    }

    static constexpr int kCount = kSegmentPages + 4;
    const bf16 *keys[kCount], *values[kCount], *later_keys[kCount], *later_values[kCount];
    const float *key_scales[kCount] = {}, *value_scales[kCount] = {};

 private:
    const AttentionShape& shape_;
    const bool packed_;
    const uint8_t *head_[kCount], *later_[kCount];
    int keys_end_ = 0, values_end_ = 0;
};

// What a block of rows sees of a segment: pages begin .. begin+num_pages-1 of it, and tokens counted from there. An even
// page comes first (see numerators).
struct View {
    int begin, num_pages;
    int newest;                  // of the block's first row
    int clean_begin, clean_end;  // pages, from `begin` on, that every row of the block sees whole
    bool clean() const { return clean_begin == 0 && clean_end >= num_pages; }
};

View view_of(const Block& block, const Tile& tile, int group, int window, int segment) {
    const int first = tile.first_position + block.row / group;
    const int last = tile.first_position + (block.row + block.rows - 1) / group;
    const int segment_page = segment * kSegmentPages;
    View view;
    view.begin = window > 0 ? std::max(0, std::max(0, first - window + 1) / kPageTokens - segment_page) & ~1 : 0;
    view.num_pages = std::min(kSegmentPages, last / kPageTokens + 1 - segment_page) - view.begin;
    const int base = (segment_page + view.begin) * kPageTokens;
    view.newest = first - base;
    view.clean_begin = window > 0 ? std::max(0, last - window + kPageTokens - base) / kPageTokens : 0;
    view.clean_end = std::max(0, view.newest + 1) / kPageTokens;
    return view;
}

void score(const Block& block, const View& view, int head_dim, bool fetch, SegmentPages& pages,
           const AttentionScratch& scratch) {
    const int step = score_pages(block.rows), end = view.begin + view.num_pages;
    const auto function = scores_function(block.rows, std::make_integer_sequence<int, kBlockRows>{});
    for (int page = view.begin; page < end; page += step) {
        KeyPages batch;
        pages.need_keys(page, std::min(page + step, end));
        for (int i = 0; i < step; ++i) {
            batch.keys[i] = pages.keys[page + i];
            batch.ahead[i] = pages.later_keys[page + i];
            batch.scales[i] = pages.key_scales[page + i];
        }
        function(scratch.queries + block.row * head_dim, head_dim, batch, fetch,
                 scratch.scores + (page - view.begin) * kPageTokens);
    }
}

// Softmax of a block's scores: rounded numerators into scratch.probs, each row's exponent and sum into result.
template <bool SCALED, bool CLEAN>
void soften(const Block& block, const View& view, int group, int window, const SegmentPages& pages,
            const AttentionScratch& scratch, const Partial& result) {
    float *most = result.max + block.row, *sum = result.sum + block.row;
    auto each_row = [&](auto&& body) {
        Seen<CLEAN> seen{0, view.newest, view.clean_begin, view.clean_end};
        for (int i = 0, left = group - block.row % group; i < block.rows; ++i) {
            if (window > 0) seen.oldest = seen.newest - window + 1;
            body(i, scratch.scores + i * kSegmentTokens, seen);
            if (--left == 0) ++seen.newest, left = group;
        }
    };
    // All rows' largest scores first: one row's would wait for its own reduction.
    each_row([&](int i, const float* scores, const Seen<CLEAN>& seen) {
        most[i] = std::ceil(largest(scores, view.num_pages, seen, kNone));
    });
    each_row([&](int i, const float* scores, const Seen<CLEAN>& seen) {
        bf16* probs = scratch.probs + i * kSegmentTokens;
        const auto* scales = pages.value_scales + view.begin;
        sum[i] = SCALED ? scaled_numerators(scores, probs, view.num_pages, seen, most[i], scales)
                        : numerators(scores, probs, view.num_pages, seen, most[i]);
        if (!std::isfinite(most[i])) sum[i] = kNotANumber;  // and not 0: that is masked
    });
}

void weigh(const Block& block, const View& view, int head_dim, bool fetch, const SegmentPages& pages,
           const AttentionScratch& scratch, float* out) {
    constexpr auto heights = std::make_integer_sequence<int, kValueRows>{};
    for (int row = 0, parts = (block.rows + kValueRows - 1) / kValueRows; parts > 0; --parts) {
        const int rows = (block.rows - row + parts - 1) / parts;
        const auto function =
            fetch && row == 0 ? values_function<true>(rows, heights) : values_function<false>(rows, heights);
        function(scratch.probs + row * kSegmentTokens, pages.values + view.begin, pages.later_values + view.begin,
                 view.num_pages, head_dim, out + row * head_dim);
        row += rows;
    }
}

}  // namespace

AttentionScratch::AttentionScratch(const AttentionShape& shape) {
    const size_t rows = static_cast<size_t>(tile_tokens(shape)) * shape.group();
    const size_t unpacked = shape.kv_format == kKvInt8 ? kSegmentPages * shape.page_values() * sizeof(bf16) : 0;
    const size_t sizes[] = {size_t{kBlockRows} * kSegmentTokens * sizeof(float),
                            size_t{kBlockRows} * kSegmentTokens * sizeof(bf16),
                            rows * shape.head_dim * sizeof(bf16),
                            unpacked,
                            unpacked,
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
    keys = reinterpret_cast<bf16*>(take());
    values = reinterpret_cast<bf16*>(take());
    for (Partial* partial : {&running, &current}) {
        partial->max = reinterpret_cast<float*>(take());
        partial->sum = reinterpret_cast<float*>(take());
        partial->values = reinterpret_cast<float*>(take());
    }
}

void pack_queries(const AttentionShape& shape, const bf16* queries, const Tile& tile, int kv_head,
                  AttentionScratch& scratch) {
    const int group = shape.group(), head_dim = shape.head_dim;
    const size_t token_stride = static_cast<size_t>(shape.num_heads) * head_dim;
    const bf16* first = queries + tile.first_token * token_stride + static_cast<size_t>(kv_head) * group * head_dim;
    each_block(tile.num_tokens * group, [&](const Block& block) {
        for (int i = 0; i < block.rows; ++i) {
            const int row = block.row + i;
            const bf16* from = first + row / group * token_stride + row % group * head_dim;
            bf16* to = scratch.queries + block.row * head_dim + 2 * i;
            for (int d = 0; d < head_dim; d += 2, to += 2 * block.rows) std::memcpy(to, from + d, 4);
        }
    });
}

void attend_segment(const AttentionShape& shape, int window, const uint8_t* layer, const Tile& tile, int kv_head,
                    int segment, const Ahead& ahead, AttentionScratch& scratch, const Partial& result) {
    const int group = shape.group(), head_dim = shape.head_dim;
    SegmentPages pages(shape, layer, tile, kv_head, segment, ahead, scratch);
    each_block(tile.num_tokens * group, [&](const Block& block) {
        const View view = view_of(block, tile, group, window, segment);
        float* values = result.values + static_cast<size_t>(block.row) * head_dim;
        if (view.num_pages <= 0) {  // a tile across a cut: none of these rows sees this segment
            std::fill_n(result.max + block.row, block.rows, kNone);
            std::fill_n(result.sum + block.row, block.rows, 0.f);
            std::fill_n(values, block.rows * head_dim, 0.f);
            return;
        }
        const bool fetch = ahead.tile && block.row == 0 && !pages.packed();
        score(block, view, head_dim, fetch, pages, scratch);
        const auto function = pages.packed() ? (view.clean() ? soften<true, true> : soften<true, false>)
                                             : (view.clean() ? soften<false, true> : soften<false, false>);
        function(block, view, group, window, pages, scratch, result);
        pages.need_values(view.begin, view.begin + view.num_pages);
        weigh(block, view, head_dim, fetch, pages, scratch, values);
    });
}

void merge(const Partial& running, const Partial& next, int rows, int head_dim) {
    for (int row = 0; row < rows; ++row) {
        if (next.sum[row] == 0) continue;  // wholly masked for this row
        const float most = std::max(running.max[row], next.max[row]);
        const __m512 one = _mm512_set1_ps(1.f);
        const __m512 keep = _mm512_scalef_ps(one, _mm512_set1_ps(running.max[row] - most));
        const __m512 add = _mm512_scalef_ps(one, _mm512_set1_ps(next.max[row] - most));
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

}  // namespace ns

// A step's plans, made before its threads start: page tables, attention's items, and what is fetched when.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "step.h"

namespace ns {
namespace {

// Of one layer, for all threads together: a quarter of a die's 32 MiB of L3 cache. More drives out what was fetched before
// it, and the weights (docs/bench-log.md). What the system says can only lower it: a guest may be told of the whole socket.
size_t most_fetched_bytes() {
    constexpr long kMost = 8 << 20;
    static const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return static_cast<size_t>(cache > 0 ? std::min(kMost, cache / 4) : kMost);
}

}  // namespace

void Step::make_pages() {
    const int factor = config_.page_factor, width = batch_.max_blocks * factor;
    if (factor > 1) {
        pages_.resize(static_cast<size_t>(batch_.rows) * width);
        for (size_t i = 0; i < pages_.size(); ++i)
            pages_[i] = batch_.block_tables[i / factor] * factor + static_cast<int>(i % factor);
    }
    const int* table = factor > 1 ? pages_.data() : batch_.block_tables;
    page_table_.resize(batch_.tokens);
    for (int row = 0; row < batch_.rows; ++row)
        for (int token = batch_.row_starts[row]; token < batch_.row_starts[row + 1]; ++token)
            page_table_[token] = table + static_cast<size_t>(row) * width;
}

AttentionPlan Step::plan_attention(int window, bool logit_tokens_only) const {
    AttentionPlan plan;
    plan.window = window;
    auto add = [&](int token, int count) {
        plan.tiles.push_back({token, count, batch_.positions[token], page_table_[token]});
    };
    if (logit_tokens_only) {
        for (int i = 0; i < batch_.logit_rows; ++i) add(batch_.logit_tokens[i], 1);
    } else {
        const int most = tile_tokens(model_.shape);
        for (int row = 0; row < batch_.rows; ++row)
            for (int token = batch_.row_starts[row]; token < batch_.row_starts[row + 1]; token += most)
                add(token, std::min(most, batch_.row_starts[row + 1] - token));
    }
    const int heads = config_.kv_heads, group = model_.shape.group(), tiles = static_cast<int>(plan.tiles.size());
    const bool few = tiles * heads < 4 * threads_;  // too few items to keep all threads busy: split contexts
    auto add_items = [&](int head, int first, int end) {
        for (int i = first; i < end; ++i, ++plan.num_groups) {
            const Tile& tile = plan.tiles[i];
            const int begin = tile.segment_begin(window), stop = tile.segment_end();
            const bool split = few && stop - begin > 1;
            if (!split) plan.items.push_back({i, head, begin, stop, -1, plan.num_groups});
            if (split) plan.slot_rows = std::max(plan.slot_rows, tile.num_tokens * group);
            for (int segment = begin; split && segment < stop; ++segment)
                plan.items.push_back({i, head, segment, segment + 1, plan.num_slots++, plan.num_groups});
        }
    };
    // Tiles of one row head by head, so that a head's keys and values are still in cache for the next tile; and in one
    // part for each thread, whose rows are then much the same in all phases.
    for (int first = 0, end; first < tiles; first = end) {
        for (end = first + 1; end < tiles && plan.tiles[end].pages == plan.tiles[first].pages;) ++end;
        for (int part = 0, parts = std::min(threads_, end - first); part < parts; ++part)
            for (int head = 0; head < heads; ++head)
                add_items(head, first + Phases::share_begin(end - first, part, parts),
                          first + Phases::share_begin(end - first, part + 1, parts));
    }
    if (model_.layers[0].qkv.leaves_dram_idle(batch_.tokens)) plan_fetches(plan);
    return plan;
}

// Which pages are fetched during which product, for each thread those that it reads first, over the products by their
// share of the arithmetic: what single tokens read, and what lies before a prompt's chunk (where several threads read it,
// the first fetches it). At most most_fetched_bytes, the pages that are read first.
void Step::plan_fetches(AttentionPlan& plan) const {
    const Layer& layer = model_.layers[0];
    const Linear* products[kNumProducts] = {&layer.output, &layer.gate_up, &layer.down, &layer.qkv};
    int64_t work[kNumProducts + 1] = {};
    for (int i = 0; i < kNumProducts; ++i)
        work[i + 1] = work[i] + static_cast<int64_t>(num_panels(products[i]->n)) * products[i]->k;
    const int items = static_cast<int>(plan.items.size());
    const size_t most = most_fetched_bytes() / threads_ / model_.shape.page();  // pages of a thread
    std::vector<int> own;
    const int* row = nullptr;  // the last one's pages
    for (int thread = 0, item = 0; thread < threads_; ++thread) {
        own.clear();
        for (const int end = Phases::share_begin(items, thread + 1, threads_); item < end; ++item) {
            if (own.size() >= most) continue;
            const Tile& tile = plan.tiles[plan.items[item].tile];
            if (tile.pages == row) continue;  // another head or part of it
            row = tile.pages;
            const int oldest = plan.window > 0 ? std::max(0, tile.first_position - plan.window + 1) : 0;
            const int after = tile.first_position / kPageTokens + (tile.num_tokens == 1 ? 1 : 0);
            own.insert(own.end(), row + oldest / kPageTokens, row + after);
        }
        const auto count = static_cast<int64_t>(std::min(own.size(), most));
        for (int i = 0; i < kNumProducts; ++i) {
            PageShares& shares = plan.fetches[i];
            shares.pages.insert(shares.pages.end(), own.begin() + count * work[i] / work[kNumProducts],
                                own.begin() + count * work[i + 1] / work[kNumProducts]);
            shares.begin[thread + 1] = static_cast<int>(shares.pages.size());
        }
    }
}

// What is fetched during `product` for that layer's attention.
KvPages Step::kv_during(Product product, int attention_layer) const {
    if (attention_layer >= config_.layers) return {};
    const PageShares& shares = plan_for(attention_layer).fetches[product];
    if (shares.pages.empty()) return {};
    return {model_.layer_kv(attention_layer), &shares, model_.shape.page()};
}

const AttentionPlan& Step::plan_for(int layer) const {
    if (layer + 1 == config_.layers && batch_.logit_rows < batch_.tokens) return last_plan_;
    for (const AttentionPlan& plan : plans_)
        if (plan.window == model_.layers[layer].raw.window) return plan;
    std::abort();  // run() made a plan for every window
}

}  // namespace ns

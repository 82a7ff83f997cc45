// What a product fetches into cache on its way: the weights that come next, and the keys and values that attention reads
// after it. DRAM has nothing else to do while the core computes.
//
// Lines are fetched one by one between the arithmetic, and only what is left at the end of a group of k together. The core
// drops a prefetch that finds no miss buffer free, and within a product that is the fate of most of a burst: of eleven
// lines at a time hardly any came (docs/bench-log.md).
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"
#include "team.h"

namespace ns {

constexpr int kFetchSteps = 16;  // within kGroup of k: one for each pair
constexpr size_t kLine = 64;

// Consecutive lines that are still to be fetched.
struct Lines {
    const uint8_t *next = nullptr, *end = nullptr;
    static Lines of(const uint8_t* begin, size_t count) { return {begin, begin + count * kLine}; }
    inline __attribute__((always_inline)) void fetch_one() {
        if (next >= end) return;
        prefetch(next);
        next += kLine;
    }
    void fetch_rest() {
        while (next < end) fetch_one();
    }
};

// Pages of KV memory to be fetched during one product, by the thread that reads them first. begin: of each thread's.
struct PageShares {
    std::vector<int> pages;
    int begin[kMaxThreads + 1] = {};
};

struct KvPages {
    const uint8_t* layer = nullptr;
    const PageShares* shares = nullptr;  // null: none
    size_t page_bytes = 0;
};

// Pages in pieces of kFetchSteps lines, one piece for each group of k that a tile goes through. The last piece of a page
// may go beyond it.
class KvPieces {
 public:
    static constexpr size_t kBytes = kFetchSteps * kLine;
    static int in_page(size_t page_bytes) { return static_cast<int>((page_bytes + kBytes - 1) / kBytes); }

    KvPieces() = default;
    KvPieces(const KvPages& kv, int first_page, int first_piece, int count)
        : layer_(kv.layer),
          page_bytes_(kv.page_bytes),
          page_(kv.shares->pages.data() + first_page + first_piece / in_page(kv.page_bytes)),
          piece_(first_piece % in_page(kv.page_bytes)),
          left_(count) {}

    Lines next() {
        if (left_ <= 0) return {};
        --left_;
        const size_t offset = piece_ * kBytes;
        const uint8_t* begin = layer_ + *page_ * page_bytes_ + offset;
        if (offset + kBytes >= page_bytes_)
            piece_ = 0, ++page_;
        else
            ++piece_;
        return Lines::of(begin, kFetchSteps);
    }

 private:
    const uint8_t* layer_ = nullptr;
    size_t page_bytes_ = 0;
    const int* page_ = nullptr;
    int piece_ = 0, left_ = 0;
};

// The part of a product's KV pages that one of its items fetches: of the pages of the thread in whose share it is.
class KvShare {
 public:
    KvShare(const KvPages& kv, int item, const Phases::Share& share) : kv_(kv) {
        if (!kv.shares) return;
        first_page_ = kv.shares->begin[share.owner];
        const int pieces = (kv.shares->begin[share.owner + 1] - first_page_) * KvPieces::in_page(kv.page_bytes);
        const int place = item - share.begin, items = share.end - share.begin;
        next_ = Phases::share_begin(pieces, place, items);
        end_ = Phases::share_begin(pieces, place + 1, items);
    }
    // For one of the item's tiles of which `left`, this one included, are still to come; `most`: its groups of k. What is
    // more than that is not fetched.
    KvPieces take(int left, int most) {
        const int count = (end_ - next_ + left - 1) / left;
        if (count <= 0) return {};
        const KvPieces pieces(kv_, first_page_, next_, std::min(count, most));
        next_ += count;
        return pieces;
    }

 private:
    const KvPages& kv_;
    int first_page_ = 0, next_ = 0, end_ = 0;
};

}  // namespace ns

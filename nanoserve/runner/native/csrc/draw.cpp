// The cumulative distribution is inverted over ids in their order, or, where top-k or top-p cut it, over ids by falling
// logit and then by id, with the uniform number of (seed, position) from Philox4x32-10 (Salmon et al., SC 2011).
//
// No row is sorted whole. Top-k sorts the ids that are not below the k-th largest of the tops of short pieces. Top-p
// puts weights into levels, each half as likely as the one before, and sorts at most two of them: the one where the
// kept mass ends, and the one that the uniform number falls into.
#include "draw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace ns {
namespace {

constexpr int kLanes = 16, kPiece = 256, kTopPiece = 64;
constexpr int kLevels = 40, kLevelsAtOnce = 4;  // what is less likely than 2^-40 of the top is one more level
constexpr float kGreedyTemperature = 1e-5f;

struct Row {
    const float* logits;
    int vocab;
    float top;    // the largest logit
    float scale;  // log2(e) / temperature
    float min_p, top_p;
    int64_t top_k;
    double uniform;
};

struct Candidate {
    float logit, weight;
    int id;
    bool operator<(const Candidate& other) const {
        return logit != other.logit ? logit > other.logit : id < other.id;
    }
};

// Memory of one thread that is kept from row to row.
struct Scratch {
    std::vector<float> weights;
    std::vector<double> sums;
    std::vector<Candidate> candidates;
};

// Sixteen values from `at`; past the end, minus infinity.
__m512 load_row(const float* values, int size, int at) {
    const int left = size - at;
    if (left >= kLanes) return _mm512_loadu_ps(values + at);
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-kInfinity), static_cast<__mmask16>((1u << left) - 1), values + at);
}

// How far below the top, in halvings: 0 and less.
__m512 distance(const Row& row, __m512 logits) {
    return _mm512_mul_ps(_mm512_sub_ps(logits, _mm512_set1_ps(row.top)), _mm512_set1_ps(row.scale));
}

// Relative to the most likely id's; 0 below min-p.
__m512 weights_of(const Row& row, __m512 logits) {
    const __m512 weights = exp2_ps(distance(row, logits));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(weights, _mm512_set1_ps(row.min_p), _CMP_GE_OQ), weights);
}

// The first of the largest logits; index -1 where a logit is not a number or the largest is not finite.
Best find_top(const float* logits, int vocab) {
    __m512 best = _mm512_set1_ps(-kInfinity);
    __mmask16 broken = 0;
    for (int i = 0; i < vocab; i += kLanes) {
        const __m512 values = load_row(logits, vocab, i);
        broken |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        best = _mm512_max_ps(best, values);
    }
    const float top = _mm512_reduce_max_ps(best);
    if (broken || !std::isfinite(top)) return {top, -1};
    for (int i = 0;; i += kLanes) {
        const __mmask16 equal = _mm512_cmp_ps_mask(load_row(logits, vocab, i), _mm512_set1_ps(top), _CMP_EQ_OQ);
        if (equal) return {top, i + __builtin_ctz(equal)};
    }
}

double below(double uniform, double total) { return std::min(uniform * total, std::nextafter(total, 0.0)); }

// The whole distribution, by id: first the piece, then the id inside it.
int draw_plain(const Row& row, Scratch& scratch) {
    scratch.sums.clear();
    double total = 0;
    for (int piece = 0; piece < row.vocab; piece += kPiece) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = piece; i < std::min(piece + kPiece, row.vocab); i += kLanes)
            sum = _mm512_add_ps(sum, weights_of(row, load_row(row.logits, row.vocab, i)));
        scratch.sums.push_back(_mm512_reduce_add_ps(sum));
        total += scratch.sums.back();
    }
    const double target = below(row.uniform, total);
    double before = 0;
    size_t piece = 0;
    while (piece + 1 < scratch.sums.size() && before + scratch.sums[piece] <= target) before += scratch.sums[piece++];
    int chosen = -1;
    alignas(64) float weights[kLanes];
    for (int i = static_cast<int>(piece) * kPiece; i < std::min<int>((piece + 1) * kPiece, row.vocab); i += kLanes) {
        _mm512_store_ps(weights, weights_of(row, load_row(row.logits, row.vocab, i)));
        for (int lane = 0; lane < kLanes; ++lane) {
            if (weights[lane] == 0) continue;
            chosen = i + lane;
            before += weights[lane];
            if (before > target) return chosen;
        }
    }
    return chosen;  // the sums were rounded: the last id that can be drawn here
}

// The ids whose logit is in [least, most), sorted, with their weights.
void gather(const Row& row, float least, float most, std::vector<Candidate>& candidates) {
    alignas(64) float logits[kLanes], weights[kLanes];
    candidates.clear();
    for (int i = 0; i < row.vocab; i += kLanes) {
        const __m512 values = load_row(row.logits, row.vocab, i);
        unsigned wanted = _mm512_cmp_ps_mask(values, _mm512_set1_ps(least), _CMP_GE_OQ) &
                          _mm512_cmp_ps_mask(values, _mm512_set1_ps(most), _CMP_LT_OQ);
        if (!wanted) continue;
        _mm512_store_ps(logits, values);
        _mm512_store_ps(weights, weights_of(row, values));
        for (; wanted; wanted &= wanted - 1) {
            const int lane = __builtin_ctz(wanted);
            if (i + lane < row.vocab) candidates.push_back({logits[lane], weights[lane], i + lane});
        }
    }
    std::sort(candidates.begin(), candidates.end());
}

// The first `count` candidates, of which `before` and then the cumulative weight say which one the target falls into.
int walk(const std::vector<Candidate>& candidates, size_t count, double before, double target) {
    int chosen = candidates[0].id;
    for (size_t i = 0; i < count; ++i) {
        if (candidates[i].weight == 0) continue;
        chosen = candidates[i].id;
        before += candidates[i].weight;
        if (before > target) break;
    }
    return chosen;
}

// How many of the candidates begin below `limit` of cumulative weight, the first `before`; adds their weight to `before`.
size_t keep(const std::vector<Candidate>& candidates, double limit, double& before) {
    size_t kept = 0;
    while (kept < candidates.size() && before < limit) before += candidates[kept++].weight;
    return kept;
}

// The k-th largest of the tops of the pieces, or, for a large k, of all: at least k logits are not below it.
float top_k_threshold(const Row& row, Scratch& scratch) {
    std::vector<float>& tops = scratch.weights;
    const int pieces = row.vocab / kTopPiece;
    if (row.top_k <= pieces) {
        tops.resize(pieces);
        for (int piece = 0; piece < pieces; ++piece) {
            __m512 best = _mm512_set1_ps(-kInfinity);
            for (int i = 0; i < kTopPiece; i += kLanes)
                best = _mm512_max_ps(best, _mm512_loadu_ps(row.logits + piece * kTopPiece + i));
            tops[piece] = _mm512_reduce_max_ps(best);
        }
    } else {
        tops.assign(row.logits, row.logits + row.vocab);
    }
    std::nth_element(tops.begin(), tops.begin() + (row.top_k - 1), tops.end(), std::greater<float>());
    return tops[row.top_k - 1];
}

// Top-k, then top-p of what is left.
int draw_top_k(const Row& row, Scratch& scratch) {
    std::vector<Candidate>& candidates = scratch.candidates;
    gather(row, top_k_threshold(row, scratch), kInfinity, candidates);
    if (candidates.size() > static_cast<size_t>(row.top_k)) candidates.resize(row.top_k);
    double total = 0, kept_mass = 0;
    for (const Candidate& candidate : candidates) total += candidate.weight;
    size_t kept = keep(candidates, row.top_p * total, kept_mass);
    if (kept == 0) return candidates[0].id;
    return walk(candidates, kept, 0, below(row.uniform, kept_mass));
}

// Weights of the levels first..first+kLevelsAtOnce-1: level i is at distances (-i-1, -i].
void weigh_levels(const Row& row, const std::vector<float>& weights, int first, double* masses) {
    __m512 sums[kLevelsAtOnce];
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    for (int i = 0; i < row.vocab; i += kLanes) {
        const __m512 far = distance(row, load_row(row.logits, row.vocab, i)), weight = _mm512_loadu_ps(&weights[i]);
        __mmask16 reached = _mm512_cmp_ps_mask(far, _mm512_set1_ps(-static_cast<float>(first)), _CMP_LE_OQ);
        for (int level = 0; level < kLevelsAtOnce; ++level) {
            const float end = -static_cast<float>(first + level + 1);
            const __mmask16 beyond = _mm512_cmp_ps_mask(far, _mm512_set1_ps(end), _CMP_LE_OQ);
            sums[level] = _mm512_mask_add_ps(sums[level], reached & ~beyond, sums[level], weight);
            reached = beyond;
        }
    }
    for (int level = 0; level < kLevelsAtOnce; ++level) masses[level] = _mm512_reduce_add_ps(sums[level]);
}

// The ids of a level, sorted. Membership is by distance, as in weigh_levels.
void gather_level(const Row& row, int level, std::vector<Candidate>& candidates) {
    alignas(64) float logits[kLanes], weights[kLanes];
    const __m512 begin = _mm512_set1_ps(-static_cast<float>(level));
    const __m512 end = _mm512_set1_ps(level < kLevels ? -static_cast<float>(level + 1) : -kInfinity);
    candidates.clear();
    for (int i = 0; i < row.vocab; i += kLanes) {
        const __m512 values = load_row(row.logits, row.vocab, i), far = distance(row, values);
        unsigned inside = _mm512_cmp_ps_mask(far, begin, _CMP_LE_OQ) & _mm512_cmp_ps_mask(far, end, _CMP_GT_OQ);
        if (!inside) continue;
        _mm512_store_ps(logits, values);
        _mm512_store_ps(weights, weights_of(row, values));
        for (; inside; inside &= inside - 1) {
            const int lane = __builtin_ctz(inside);
            if (weights[lane] > 0) candidates.push_back({logits[lane], weights[lane], i + lane});
        }
    }
    std::sort(candidates.begin(), candidates.end());
}

int draw_top_p(const Row& row, Scratch& scratch) {
    std::vector<float>& weights = scratch.weights;
    weights.resize((row.vocab + kLanes - 1) / kLanes * kLanes);
    double total = 0;
    for (int piece = 0; piece < row.vocab; piece += kPiece) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = piece; i < std::min(piece + kPiece, row.vocab); i += kLanes) {
            const __m512 weight = weights_of(row, load_row(row.logits, row.vocab, i));
            _mm512_storeu_ps(&weights[i], weight);
            sum = _mm512_add_ps(sum, weight);
        }
        total += _mm512_reduce_add_ps(sum);
    }
    const double limit = row.top_p * total;
    double masses[kLevels + 1], before = 0;
    int last = 0;  // the level where the kept mass ends
    for (;; before += masses[last++]) {
        if (last == kLevels) {
            masses[last] = std::max(0.0, total - before);
            break;
        }
        if (last % kLevelsAtOnce == 0) weigh_levels(row, weights, last, masses + last);
        if (before + masses[last] >= limit) break;
    }
    std::vector<Candidate>& candidates = scratch.candidates;
    gather_level(row, last, candidates);
    double kept_mass = before;
    size_t kept = keep(candidates, limit, kept_mass);
    if (kept_mass == 0) return -1;  // a top-p of 0: the likeliest id
    const double target = below(row.uniform, kept_mass);
    double reached = 0;
    for (int level = 0; level < last; reached += masses[level++]) {
        if (target >= reached + masses[level]) continue;
        gather_level(row, level, candidates);
        return walk(candidates, candidates.size(), reached, target);
    }
    if (kept == 0) {  // the level's sum was rounded up to the limit
        gather_level(row, last - 1, candidates);
        return candidates.back().id;
    }
    return walk(candidates, kept, before, target);
}

double uniform_of(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = c[0] * uint64_t{0xD2511F53}, p1 = c[2] * uint64_t{0xCD9E8D57};
        c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0];
        c[1] = static_cast<uint32_t>(p1);
        c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1];
        c[3] = static_cast<uint32_t>(p0);
        k[0] += 0x9E3779B9;
        k[1] += 0xBB67AE85;
    }
    return static_cast<double>(uint64_t{c[0]} << 21 | c[1] >> 11) * 0x1p-53;
}

const float* logits_of(const NsDraw& draw, int row) {
    return draw.logits + static_cast<size_t>(draw.rows[row].logit_row) * draw.logit_stride;
}

int draw_row(const NsDraw& draw, int index, const Best& top, Scratch& scratch) {
    const NsDrawRow& asked = draw.rows[index];
    if (top.index < 0 || asked.temperature < kGreedyTemperature) return top.index;
    Row row{logits_of(draw, index), draw.vocab, top.value, 1.44269504f / asked.temperature, asked.min_p, asked.top_p,
            asked.top_k, 0};
    row.uniform = uniform_of(static_cast<uint64_t>(asked.seed), static_cast<uint64_t>(asked.position));
    const bool has_top_k = row.top_k > 0 && row.top_k < row.vocab;
    if (has_top_k) return draw_top_k(row, scratch);
    if (row.top_p >= 1) return draw_plain(row, scratch);
    const int chosen = draw_top_p(row, scratch);
    return chosen < 0 ? top.index : chosen;
}

}  // namespace

void draw_token(const NsDraw& draw, int row, const Best& top) {
    thread_local Scratch scratch;
    draw.token_ids[row] = draw_row(draw, row, top, scratch);
}

void draw_tokens(const NsDraw& draw, Team* team) {
    std::atomic<int> next{0};
    const auto work = [&](int) {
        for (int row; (row = next.fetch_add(1, std::memory_order_relaxed)) < draw.num_rows;)
            draw_token(draw, row, find_top(logits_of(draw, row), draw.vocab));
    };
    if (team && draw.num_rows > 1) team->run_with_whoever_comes(work);
    else work(0);
}

}  // namespace ns

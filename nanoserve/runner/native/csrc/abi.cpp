#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#include "draw.h"
#include "step.h"

namespace ns {

Arena::~Arena() { std::free(base_); }

bool Arena::reserve(size_t bytes) {
    constexpr size_t kHugePage = 2 << 20;
    if (bytes <= size_) return true;
    const size_t size = (bytes + bytes / 4 + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = std::aligned_alloc(kHugePage, size);
    if (!memory) return false;
    madvise(memory, size, MADV_HUGEPAGE);
    std::free(base_);
    base_ = static_cast<uint8_t*>(memory);
    size_ = size;
    return true;
}

static Linear linear(const NsLinear& raw) {
    return {raw.n, raw.k, {raw.format, raw.panels}, {raw.few_format, raw.few_panels}, raw.bias};
}

Model::Model(const NsConfig& config_, const bf16* embedding_, const Linear& head_, const float* final_norm_)
    : config(config_),
      shape{config_.heads, config_.kv_heads, config_.head_dim, config_.kv_format},
      embedding(embedding_),
      head(head_),
      final_norm(final_norm_),
      layers(config_.layers),
      has_integers(is_integer(head_.main.format)),
      team(config_.threads),
      phases(team) {
    for (int i = 0; i < team.size(); ++i) attention_scratch.push_back(std::make_unique<AttentionScratch>(shape));
}

// Whether token ids, positions and the blocks behind them exist, and sets highest_block. A step trusts its batch.
static int32_t check(const Model& model, NsBatch* batch) {
    const int block_size = model.config.page_factor * kPageTokens;
    const int64_t num_blocks = model.kv_pages / model.config.page_factor;
    batch->highest_block = -1;
    for (int row = 0; row < batch->rows; ++row) {
        int used = 0;
        for (int i = batch->row_starts[row]; i < batch->row_starts[row + 1]; ++i) {
            const int token = batch->token_ids[i], position = batch->positions[i];
            if (token < 0 || token >= model.config.vocab) return kBadToken;
            if (position < 0 || position >= batch->max_positions) return kBadPosition;
            used = std::max(used, position / block_size + 1);
        }
        if (used > batch->max_blocks) return kBadBlock;
        for (int i = 0; i < used; ++i) {
            const int block = batch->block_tables[static_cast<size_t>(row) * batch->max_blocks + i];
            if (block < 0 || block >= num_blocks) return kBadBlock;
            batch->highest_block = std::max(batch->highest_block, block);
        }
    }
    return kFine;
}

}  // namespace ns

struct NsModel {
    ns::Model model;
};

using namespace ns;

extern "C" {

NsModel* ns_model_new(const NsConfig* config, const uint16_t* embedding, const NsLinear* head,
                      const float* final_norm) {
    return new (std::nothrow) NsModel{Model(*config, embedding, linear(*head), final_norm)};
}

void ns_model_set_layer(NsModel* handle, int32_t index, const NsLayer* layer) {
    handle->model.layers[index] = {*layer, linear(layer->qkv), linear(layer->output), linear(layer->gate_up),
                                   linear(layer->down)};
    for (const NsLinear* part : {&layer->qkv, &layer->output, &layer->gate_up, &layer->down})
        handle->model.has_integers |= is_integer(part->format);
}

void ns_model_set_kv(NsModel* handle, uint8_t* memory, int64_t pages) {
    handle->model.kv = memory;
    handle->model.kv_pages = pages;
}

int32_t ns_model_step(NsModel* handle, NsBatch* batch, float* logits, int32_t* greedy, const NsDraw* draw) {
    if (const int32_t fault = check(handle->model, batch)) return fault;
    try {
        return Step(handle->model, *batch, logits, greedy, draw).run() ? kFine : kNoMemory;
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}

int32_t ns_model_draw(NsModel* handle, const NsDraw* draw) {
    try {
        draw_tokens(*draw, handle ? &handle->model.team : nullptr);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

void ns_model_slow_thread(NsModel* handle, int32_t thread, int32_t microseconds) {
    handle->model.phases.make_slow(thread, microseconds);
}

void ns_model_free(NsModel* handle) { delete handle; }

int64_t ns_packed_bytes(int32_t format, int32_t n, int32_t k) {
    return static_cast<int64_t>(num_panels(n) * panel_bytes(format, k));
}

void ns_pack(uint8_t* panels, int32_t format, const void* source, int32_t type, int32_t n, int32_t k, int32_t paired,
             int32_t threads) {
    Team team(threads);
    team.run([&](int thread) {
        const int total = num_panels(n), begin = Phases::share_begin(total, thread, team.size());
        const int end = Phases::share_begin(total, thread + 1, team.size());
        if (type == 0) return pack_bf16(panels, static_cast<const bf16*>(source), n, k, paired != 0, begin, end);
        if (type == 1)
            return pack_int8(panels, format, static_cast<const float*>(source), n, k, paired != 0, begin, end);
        pack_gguf(panels, format, static_cast<const uint8_t*>(source), type, n, k, paired != 0, begin, end);
    });
}

void ns_matmul(const NsLinear* raw, const uint16_t* x, int32_t m, float* y, int32_t threads) {
    Team team(threads);
    Phases phases(team);
    const Linear weight = linear(*raw);
    const size_t stride = static_cast<size_t>(kPanel) * weight.k;
    std::vector<bf16> scratch(stride * team.size() + 32);
    std::vector<uint8_t> memory(is_integer(weight.form(m).format) ? m * IntegerRows::stride(weight.k) : 0);
    const IntegerRows integers(memory.data(), weight.k);
    std::vector<float> wide(weight.k);
    for (int row = 0; row < m && !memory.empty(); ++row) {
        widen(wide.data(), x + static_cast<size_t>(row) * weight.k, weight.k);
        integers.write(row, wide.data());
    }
    team.run([&](int thread) {
        phases.begin(thread, gemm_items(weight, m));
        const GemmJob job{&weight, x, integers, m, Epilogue::kStore, y, num_panels(weight.n) * kPanel};
        gemm(phases, thread, job, scratch.data() + stride * thread);
    });
}

double ns_read_bandwidth(const uint8_t* memory, int64_t bytes, int32_t threads) {
    Team team(threads);
    std::vector<uint64_t> sums(static_cast<size_t>(team.size()) * 8);
    const auto start = std::chrono::steady_clock::now();
    team.run([&](int thread) {
        const int64_t begin = bytes * thread / team.size() / 64 * 64,
                      end = bytes * (thread + 1) / team.size() / 64 * 64;
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = begin; i < end; i += 64) {
            prefetch(memory + i + 4096);
            sum = _mm512_add_epi64(sum, _mm512_loadu_si512(memory + i));
        }
        sums[thread * 8] = static_cast<uint64_t>(_mm512_reduce_add_epi64(sum));
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    volatile uint64_t sink = sums[0];
    (void)sink;
    return static_cast<double>(bytes) / took.count() / 1e9;
}
}

// One forward step: the buffers it needs and the phases the team goes through.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "model.h"
#include "rotate.h"
#include "team.h"

namespace ns {

struct Layer {
    NsLayer raw;
    Linear qkv, output, gate_up, down;
};

// Memory that grows and is reused; nothing in it lives from step to step.
class Arena {
 public:
    ~Arena();
    bool reserve(size_t bytes);
    void rewind() { used_ = 0; }
    template <class T>
    T* take(size_t count) {
        T* here = reinterpret_cast<T*>(base_ + used_);
        used_ += padded(count * sizeof(T));
        return here;
    }
    static size_t padded(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

 private:
    uint8_t* base_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

// A piece of attention work that one thread does alone: a tile's segments begin..end-1 of one kv head.
struct AttentionItem {
    int tile, kv_head, begin, end;
    int slot;   // where its partial goes when the context is split over threads, else -1
    int group;  // which (tile, kv head) it belongs to
};

// The products between one layer's attention and the next one's, in order.
enum Product { kOutput, kGateUp, kDown, kQkv, kNumProducts };

struct AttentionPlan {
    int window = 0;
    std::vector<Tile> tiles;
    std::vector<AttentionItem> items;
    int num_slots = 0, num_groups = 0;
    int slot_rows = 0;  // query rows a slot has room for
    PageShares fetches[kNumProducts];  // pages that are fetched during the products before
};

// What goes into a product, row by row: `x` as it is, or, where that is null, the normed residual (with `post_norm`, after
// adding the normed branch to it). For integer weights it is rounded to 8 bits.
struct Input {
    const bf16* x = nullptr;
    const float *norm = nullptr, *post_norm = nullptr;
};

struct Model {
    NsConfig config;
    AttentionShape shape;
    const bf16* embedding;
    Linear head;
    const float* final_norm;
    std::vector<Layer> layers;
    bool has_integers;  // some matrix is multiplied as integers
    uint8_t* kv = nullptr;
    int64_t kv_pages = 0;
    Team team;
    Phases phases;
    Arena arena;
    std::vector<std::unique_ptr<AttentionScratch>> attention_scratch;

    Model(const NsConfig& config, const bf16* embedding, const Linear& head, const float* final_norm);
    uint8_t* layer_kv(int layer) { return kv + static_cast<size_t>(layer) * kv_pages * shape.page(); }
};

class Step {
 public:
    Step(Model& model, const NsBatch& batch, float* logits, int32_t* greedy, const NsDraw* draw);
    bool run();

 private:
    // Before the team starts (all but make_buffers in step_plan.cpp).
    void make_pages();
    AttentionPlan plan_attention(int window, bool logit_tokens_only) const;
    void plan_fetches(AttentionPlan& plan) const;
    bool make_buffers();
    // What was planned, for the threads to look up.
    const AttentionPlan& plan_for(int layer) const;
    KvPages kv_during(Product product, int attention_layer) const;
    // What each thread does; every one of these waits for the one before to be complete.
    void work(int thread);
    template <class Body>
    void each_row(int thread, int rows, Body body);
    void embed(int thread);
    void multiply(int thread, const Linear& weight, const Input& input, int rows, Epilogue epilogue, void* out, int ld,
                  const uint8_t* next, const KvPages& kv_ahead = {}, const Rotation* rotation = nullptr);
    void rotate(int thread, const Rotation& rotation);
    void attend(int thread, const AttentionPlan& plan, const uint8_t* kv, const Rotation* rotation);
    void keep_logit_rows(int thread);
    void finish_layer(int thread, int index);
    void project_logits(int thread);
    void draw_tokens(int thread);
    // Inside phases.
    bf16* normed(int thread) { return private_rows_ ? h_private_ + thread * private_stride_ : h_; }
    IntegerRows integers(int thread, int k) const {
        return {integers_ + (private_rows_ ? thread * integers_stride_ : 0), k};
    }
    void prepare_row(int thread, int row, const Input& input, int integer_k);
    Rotation rotation_of(int layer) const;
    void rotate_head(const Rotation& rotation, int token, int kv_head);
    void run_item(int thread, const AttentionPlan& plan, const AttentionItem& item, const AttentionItem* next,
                  const uint8_t* kv);
    void merge_group(const AttentionPlan& plan, const AttentionItem& item);
    Best best_of(int row) const;
    Partial slot(const AttentionPlan& plan, int index) const;
    const uint8_t* first(int thread, const Linear& weight, int rows) const {
        return first_panel(weight, rows, thread, model_.team.size());
    }

    Model& model_;
    const NsConfig& config_;
    const NsBatch& batch_;
    float* const logits_;
    int32_t* const greedy_;
    const NsDraw* const draw_;  // null: nothing is drawn
    const int threads_;
    const bool one_token_rows_;
    bool private_rows_ = false;           // few rows: every thread prepares all of them itself, which saves a phase
    std::vector<int> pages_;              // per row its page table
    std::vector<const int*> page_table_;  // per token
    std::vector<AttentionPlan> plans_;
    AttentionPlan last_plan_;
    // x: fp32 residual stream; h: what goes into a product
    float *x_ = nullptr, *qkv_ = nullptr, *branch_ = nullptr, *partials_ = nullptr;
    bf16 *h_ = nullptr, *h_private_ = nullptr, *q_ = nullptr, *attended_ = nullptr, *gated_ = nullptr;
    bf16* decoded_ = nullptr;
    float* wide_ = nullptr;  // of each thread: a row on its way to integers
    uint8_t* integers_ = nullptr;
    Best* best_ = nullptr;
    std::atomic<int>* finished_ = nullptr;
    size_t private_stride_ = 0, decoded_stride_ = 0, widest_ = 0, integers_stride_ = 0;
};

}  // namespace ns

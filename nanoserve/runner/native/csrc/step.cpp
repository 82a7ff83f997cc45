#include "step.h"

#include <algorithm>
#include <cmath>

#include "draw.h"
#include "norm.h"

namespace ns {
namespace {

constexpr int kPrivateRows = 4;
constexpr int kRunsPerThread = 4;
constexpr float kLog2e = 1.44269504f;

// Counts alone do not tell: a row may have two tokens beside one that has none.
bool has_one_token_rows(const NsBatch& batch) {
    if (batch.rows != batch.tokens) return false;
    for (int row = 0; row < batch.rows; ++row)
        if (batch.row_starts[row] != row) return false;
    return true;
}

}  // namespace

Step::Step(Model& model, const NsBatch& batch, float* logits, int32_t* greedy, const NsDraw* draw)
    : model_(model),
      config_(model.config),
      batch_(batch),
      logits_(logits),
      greedy_(greedy),
      draw_(draw),
      threads_(model.team.size()),
      one_token_rows_(has_one_token_rows(batch)) {
    // Not with post norms: there a norm also changes the residual stream, which only one thread may do.
    private_rows_ = batch.tokens <= kPrivateRows && !config_.post_norms;
}

bool Step::make_buffers() {
    const size_t rows = batch_.tokens, hidden = config_.hidden,
                 heads = static_cast<size_t>(config_.heads) * config_.head_dim;
    const size_t qkv = heads + 2 * static_cast<size_t>(config_.kv_heads) * config_.head_dim,
                 logit_rows = batch_.logit_rows;
    auto slot_floats = [&](const AttentionPlan& plan) {
        return static_cast<size_t>(plan.num_slots) * plan.slot_rows * (config_.head_dim + 2);
    };
    size_t partials = slot_floats(last_plan_), groups = last_plan_.num_groups;
    for (const AttentionPlan& plan : plans_) {
        partials = std::max(partials, slot_floats(plan));
        groups = std::max<size_t>(groups, plan.num_groups);
    }
    const size_t privates = private_rows_ ? threads_ : 0;
    private_stride_ = rows * hidden;
    const int longest = std::max({config_.hidden, config_.intermediate, static_cast<int>(heads)});
    decoded_stride_ = static_cast<size_t>(kPanel) * longest;
    widest_ = model_.has_integers ? longest : 0;
    integers_stride_ = model_.has_integers ? rows * IntegerRows::stride(longest) : 0;
    const size_t integers = integers_stride_ * (private_rows_ ? threads_ : 1);
    const size_t floats = rows * (hidden * 2 + qkv) + partials + threads_ * widest_;
    const size_t halves =
        rows * (hidden + 2 * heads + config_.intermediate) + privates * private_stride_ + threads_ * decoded_stride_;
    if (!model_.arena.reserve(floats * 4 + halves * 2 + threads_ * logit_rows * sizeof(Best) + groups * sizeof(int) +
                              integers + 4096))
        return false;
    Arena& arena = model_.arena;
    arena.rewind();
    x_ = arena.take<float>(rows * hidden);
    branch_ = arena.take<float>(rows * hidden);
    qkv_ = arena.take<float>(rows * qkv);
    partials_ = arena.take<float>(partials);
    h_ = arena.take<bf16>(rows * hidden);
    q_ = arena.take<bf16>(rows * heads);
    attended_ = arena.take<bf16>(rows * heads);
    gated_ = arena.take<bf16>(rows * config_.intermediate);
    h_private_ = arena.take<bf16>(privates * private_stride_);
    decoded_ = arena.take<bf16>(threads_ * decoded_stride_);
    wide_ = arena.take<float>(threads_ * widest_);
    integers_ = arena.take<uint8_t>(integers);
    best_ = arena.take<Best>(threads_ * logit_rows);
    finished_ = arena.take<std::atomic<int>>(groups);
    for (size_t i = 0; i < groups; ++i) new (finished_ + i) std::atomic<int>(0);
    std::fill(best_, best_ + threads_ * logit_rows, Best{-kInfinity, 0});
    return true;
}

bool Step::run() {
    if (batch_.tokens == 0) return true;
    make_pages();
    for (const Layer& layer : model_.layers)
        if (std::none_of(plans_.begin(), plans_.end(),
                         [&](const auto& plan) { return plan.window == layer.raw.window; }))
            plans_.push_back(plan_attention(layer.raw.window, false));
    if (batch_.logit_rows < batch_.tokens) last_plan_ = plan_attention(model_.layers.back().raw.window, true);
    if (!make_buffers()) return false;
    model_.phases.reset();
    model_.team.run_with_whoever_comes([this](int thread) { work(thread); });
    for (int row = 0; row < batch_.logit_rows; ++row) greedy_[row] = best_of(row).index;
    return true;
}

// The largest logit of a row, once all are there; its index is -1 where they are not finite.
Best Step::best_of(int row) const {
    Best best = best_[row];
    for (int other_thread = 1; other_thread < threads_; ++other_thread) {
        const Best& other = best_[static_cast<size_t>(other_thread) * batch_.logit_rows + row];
        if (other.value > best.value || (other.value == best.value && other.index < best.index)) best = other;
    }
    return {best.value, std::isfinite(best.value) ? best.index : -1};
}

void Step::work(int thread) {
    embed(thread);
    const int qkv_width = model_.layers[0].qkv.n;
    for (int i = 0; i < config_.layers; ++i) {
        const Layer& layer = model_.layers[i];
        const float* post = config_.post_norms && i > 0 ? model_.layers[i - 1].raw.post_mlp_norm : nullptr;
        const bool last = i + 1 == config_.layers;
        const AttentionPlan& plan = plan_for(i);
        const Rotation rotation = rotation_of(i);
        // Rows of one token each: by who reads the rotated head next, while it is in cache.
        const bool in_attention = one_token_rows_ && plan.num_slots == 0 && &plan != &last_plan_;
        const bool in_product = !in_attention && rotation.by_panel();
        multiply(thread, layer.qkv, {nullptr, layer.raw.input_norm, post}, batch_.tokens,
                 in_product ? Epilogue::kRotate : Epilogue::kStore, qkv_, qkv_width,
                 first(thread, layer.output, batch_.tokens), kv_during(kQkv, i), &rotation);
        if (!in_attention && !in_product) rotate(thread, rotation);
        if (last && batch_.logit_rows == 0) return;  // the middle of prompts: only keys and values were wanted
        attend(thread, plan, model_.layer_kv(i), in_attention ? &rotation : nullptr);
        if (last && batch_.logit_rows < batch_.tokens) keep_logit_rows(thread);
        finish_layer(thread, i);
    }
    project_logits(thread);
    if (draw_) draw_tokens(thread);
}

// A phase of little work on each row: taken in runs, because where threads share no cache every claim and every row that
// another thread has touched costs more than the work.
template <class Body>
void Step::each_row(int thread, int rows, Body body) {
    const int runs = std::min(rows, kRunsPerThread * threads_);
    model_.phases.begin(thread, runs);
    for (int run; (run = model_.phases.claim(thread)) >= 0;)
        for (int row = Phases::share_begin(rows, run, runs); row < Phases::share_begin(rows, run + 1, runs); ++row)
            body(row);
}

void Step::embed(int thread) {
    const __m512 scale = _mm512_set1_ps(config_.embed_scale);
    each_row(thread, batch_.tokens, [&](int token) {
        const bf16* row = model_.embedding + static_cast<size_t>(batch_.token_ids[token]) * config_.hidden;
        float* x = x_ + static_cast<size_t>(token) * config_.hidden;
        for (int i = 0; i < config_.hidden; i += 16) _mm512_storeu_ps(x + i, _mm512_mul_ps(load_bf16(row + i), scale));
    });
}

// One row of a product's input; `integer_k` is its length where the weights are integers, else 0.
void Step::prepare_row(int thread, int row, const Input& input, int integer_k) {
    const int hidden = config_.hidden;
    float* wide = wide_ + thread * widest_;
    if (input.norm) {
        float* x = x_ + static_cast<size_t>(row) * hidden;
        bf16* h = normed(thread) + static_cast<size_t>(row) * hidden;
        if (input.post_norm)
            rms_norm(branch_ + static_cast<size_t>(row) * hidden, input.post_norm, hidden, config_.norm_eps,
                     [&](int i, __m512 v) { _mm512_storeu_ps(x + i, _mm512_add_ps(_mm512_loadu_ps(x + i), v)); });
        rms_norm(x, input.norm, hidden, config_.norm_eps,
                 [&](int i, __m512 v) { integer_k ? _mm512_storeu_ps(wide + i, v) : store_bf16(h + i, v); });
    } else {
        widen(wide, input.x + static_cast<size_t>(row) * integer_k, integer_k);
    }
    if (integer_k) integers(thread, integer_k).write(row, wide);
}

// out (+)= weight * input
void Step::multiply(int thread, const Linear& weight, const Input& input, int rows, Epilogue epilogue, void* out,
                    int ld, const uint8_t* next, const KvPages& kv_ahead, const Rotation* rotation) {
    const int integer_k = is_integer(weight.form(rows).format) ? weight.k : 0;
    const bool prepares = input.norm || integer_k;
    if (prepares && !private_rows_)
        each_row(thread, rows, [&](int row) { prepare_row(thread, row, input, integer_k); });
    if (!model_.phases.begin(thread, gemm_items(weight, rows))) return;
    // A thread that comes late may read what others change already: it finds no item left, and uses nothing of it.
    if (prepares && private_rows_)
        for (int row = 0; row < rows; ++row) prepare_row(thread, row, input, integer_k);
    Best* best = best_ + static_cast<size_t>(thread) * batch_.logit_rows;
    const bf16* x = input.x ? input.x : normed(thread);
    const GemmJob job{&weight, x, integers(thread, weight.k), rows, epilogue, out,  ld,
                      best,    next, kv_ahead, rotation};
    gemm(model_.phases, thread, job, decoded_ + static_cast<size_t>(thread) * decoded_stride_);
}

Rotation Step::rotation_of(int layer) const {
    return {model_.layers[layer].raw, model_.shape, batch_.positions, page_table_.data(), model_.layer_kv(layer), q_,
            config_.attention_scale * kLog2e, config_.norm_eps};
}

void Step::rotate_head(const Rotation& rotation, int token, int kv_head) {
    rotation.write_head(kv_head, token, qkv_ + static_cast<size_t>(token) * model_.layers[0].qkv.n);
}

void Step::rotate(int thread, const Rotation& rotation) {
    each_row(thread, batch_.tokens, [&](int token) {
        for (int head = 0; head < config_.kv_heads; ++head) rotate_head(rotation, token, head);
    });
}

Partial Step::slot(const AttentionPlan& plan, int index) const {
    const size_t rows = plan.slot_rows;
    float* base = partials_ + index * rows * (config_.head_dim + 2);
    return {base, base + rows, base + 2 * rows};
}

// `rotation`: if the heads are still to be rotated.
void Step::attend(int thread, const AttentionPlan& plan, const uint8_t* kv, const Rotation* rotation) {
    model_.phases.begin(thread, static_cast<int>(plan.items.size()));
    for (int index; (index = model_.phases.claim(thread)) >= 0;) {
        const int next = model_.phases.peek(thread);
        const AttentionItem& item = plan.items[index];
        if (rotation) rotate_head(*rotation, plan.tiles[item.tile].first_token, item.kv_head);
        run_item(thread, plan, item, next < 0 ? nullptr : &plan.items[next], kv);
    }
}

void Step::run_item(int thread, const AttentionPlan& plan, const AttentionItem& item, const AttentionItem* next,
                    const uint8_t* kv) {
    AttentionScratch& scratch = *model_.attention_scratch[thread];
    const Tile& tile = plan.tiles[item.tile];
    const int rows = tile.num_tokens * model_.shape.group();
    pack_queries(model_.shape, q_, tile, item.kv_head, scratch);
    for (int segment = item.begin; segment < item.end; ++segment) {
        Ahead ahead;
        if (segment + 1 < item.end)
            ahead = {&tile, item.kv_head, segment + 1};
        else if (next)
            ahead = {&plan.tiles[next->tile], next->kv_head, next->begin};
        if (tile.num_tokens > 1) ahead.tile = nullptr;  // much arithmetic on what is mostly in cache
        const Partial result = item.slot >= 0          ? slot(plan, item.slot)
                               : segment == item.begin ? scratch.running
                                                       : scratch.current;
        attend_segment(model_.shape, plan.window, kv, tile, item.kv_head, segment, ahead, scratch, result);
        if (segment > item.begin) merge(scratch.running, scratch.current, rows, config_.head_dim);
    }
    if (item.slot >= 0)
        merge_group(plan, item);
    else
        finish_attention(model_.shape, scratch.running, tile, item.kv_head, attended_);
}

// The thread that finishes the last segment of a head merges all of them, in order.
void Step::merge_group(const AttentionPlan& plan, const AttentionItem& item) {
    const Tile& tile = plan.tiles[item.tile];
    const int begin = tile.segment_begin(plan.window), count = tile.segment_end() - begin;
    std::atomic<int>& finished = finished_[item.group];
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    finished.store(0, std::memory_order_relaxed);
    const int first_slot = item.slot - (item.begin - begin), rows = tile.num_tokens * model_.shape.group();
    for (int i = 1; i < count; ++i)
        merge(slot(plan, first_slot), slot(plan, first_slot + i), rows, config_.head_dim);
    finish_attention(model_.shape, slot(plan, first_slot), tile, item.kv_head, attended_);
}

// After the last layer's attention nobody needs the rows without logits: moves the others to the front.
void Step::keep_logit_rows(int thread) {
    const size_t hidden = config_.hidden, heads = static_cast<size_t>(config_.heads) * config_.head_dim;
    model_.phases.begin(thread, 1);
    while (model_.phases.claim(thread) == 0)
        for (int i = 0; i < batch_.logit_rows; ++i) {  // ascending, so a row never overwrites one still needed
            const size_t from = batch_.logit_tokens[i];
            std::memmove(attended_ + i * heads, attended_ + from * heads, heads * sizeof(bf16));
            std::memmove(x_ + i * hidden, x_ + from * hidden, hidden * sizeof(float));
        }
}

void Step::finish_layer(int thread, int index) {
    const Layer& layer = model_.layers[index];
    const bool last = index + 1 == config_.layers, post = config_.post_norms;
    const int rows = last ? batch_.logit_rows : batch_.tokens;
    const Epilogue add = post ? Epilogue::kStore : Epilogue::kAdd;
    void* target = post ? branch_ : x_;
    const Linear& after = last ? model_.head : model_.layers[index + 1].qkv;
    multiply(thread, layer.output, {attended_}, rows, add, target, config_.hidden, first(thread, layer.gate_up, rows),
             kv_during(kOutput, index + 1));
    multiply(thread, layer.gate_up, {nullptr, layer.raw.mlp_norm, post ? layer.raw.post_attention_norm : nullptr}, rows,
             config_.gelu ? Epilogue::kGeluMul : Epilogue::kSiluMul, gated_, config_.intermediate,
             first(thread, layer.down, rows), kv_during(kGateUp, index + 1));
    multiply(thread, layer.down, {gated_}, rows, add, target, config_.hidden, first(thread, after, rows),
             kv_during(kDown, index + 1));
}

void Step::project_logits(int thread) {
    const float* post = config_.post_norms ? model_.layers.back().raw.post_mlp_norm : nullptr;
    multiply(thread, model_.head, {nullptr, model_.final_norm, post}, batch_.logit_rows, Epilogue::kLogits, logits_,
             batch_.logit_stride, nullptr);
}

void Step::draw_tokens(int thread) {
    model_.phases.begin(thread, draw_->num_rows);
    for (int row; (row = model_.phases.claim(thread)) >= 0;)
        draw_token(*draw_, row, best_of(draw_->rows[row].logit_row));
}

}  // namespace ns

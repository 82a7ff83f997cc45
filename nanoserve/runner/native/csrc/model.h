// The C ABI of the engine and the model behind it. Plain structs: the Python side mirrors them with ctypes.
#pragma once
#include <cstdint>

extern "C" {

struct NsConfig {
    int32_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
    int32_t gelu;        // 0: silu(gate) * up, 1: gelu_tanh(gate) * up
    int32_t post_norms;  // Gemma: norms after attention and MLP too, before the residual is added
    int32_t threads;
    int32_t page_factor;  // 16-token pages per block of the block tables
    int32_t kv_format;    // KvFormat of kv.h: 0 bf16, 1 int8
    float norm_eps, embed_scale, attention_scale;
};

struct NsLinear {
    int32_t n, k, format, few_format;
    const uint8_t* panels;
    const uint8_t* few_panels;  // null, or the same weights in another format, for steps of few rows
    const float* bias;
};

struct NsLayer {
    NsLinear qkv, output, gate_up, down;
    const float *input_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;  // the second and last with post_norms
    const float *q_norm, *k_norm;                                              // [head_dim] or null
    const float *rope_cos, *rope_sin;                                          // [positions, head_dim/2]
    int32_t window;                                                            // 0: causal
    int32_t reserved;
};

struct NsBatch {  // ForwardBatch with its sizes
    int32_t tokens, rows, max_blocks, logit_rows;
    int32_t logit_stride;   // floats from one row of logits to the next
    int32_t max_positions;  // of the rope tables
    int32_t highest_block;  // an answer: the last of the blocks in use, -1 without any
    const int32_t *token_ids, *positions, *row_starts, *block_tables, *logit_tokens;
};

struct NsDrawRow {  // runner/sampler.py: SAMPLE_ROW
    int64_t seed, position, top_k;
    int32_t logit_row;  // of the logits, from which this is drawn
    float temperature, top_p, min_p;
};

struct NsDraw {
    int32_t num_rows, vocab, logit_stride;
    const NsDrawRow* rows;
    const float* logits;
    int32_t* token_ids;  // drawn; -1 for a row whose largest logit is not finite
};

struct NsModel;

NsModel* ns_model_new(const NsConfig* config, const uint16_t* embedding, const NsLinear* head, const float* final_norm);
void ns_model_set_layer(NsModel* model, int32_t index, const NsLayer* layer);
void ns_model_set_kv(NsModel* model, uint8_t* memory, int64_t pages);
enum NsFault : int32_t { kNoMemory = -1, kFine = 0, kBadToken = 1, kBadPosition = 2, kBadBlock = 3 };
// One step, or an NsFault where an index in the batch is out of range or memory for the step cannot be had. Sets
// highest_block. logits [logit_rows, vocab], or null; greedy [logit_rows]: the argmax, -1 for a row that is not finite.
// With `draw`, also draws from these logits, as its last phase.
int32_t ns_model_step(NsModel* model, NsBatch* batch, float* logits, int32_t* greedy, const NsDraw* draw);
// Draws a token from each row. A null model: by the calling thread alone.
int32_t ns_model_draw(NsModel* model, const NsDraw* draw);
// For tests: thread `thread` sleeps so long before one item in eight, as if another process had its core. -1: none.
void ns_model_slow_thread(NsModel* model, int32_t thread, int32_t microseconds);
void ns_model_free(NsModel* model);

int64_t ns_packed_bytes(int32_t format, int32_t n, int32_t k);
// source_type: 0 bf16 rows (to kBf16), 1 fp32 rows (to kQ8 or kU8), else a GGUF type number whose blocks are taken as they
// are, into a format of as many bits.
void ns_pack(uint8_t* panels, int32_t format, const void* source, int32_t source_type, int32_t n, int32_t k, int32_t paired,
             int32_t threads);
// For tests and measurements: y[m, n] = x W^T (fp32, n padded to 32), and the read bandwidth of memory in GB/s.
void ns_matmul(const NsLinear* weight, const uint16_t* x, int32_t m, float* y, int32_t threads);
double ns_read_bandwidth(const uint8_t* memory, int64_t bytes, int32_t threads);
}

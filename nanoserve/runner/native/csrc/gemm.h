// Matrix products y = x W^T with W packed once, and what is fused to their ends.
#pragma once
#include "fetch.h"
#include "quantize.h"
#include "simd.h"
#include "team.h"

namespace ns {

// How a weight lies in memory. All formats are cut into panels of 32 output columns; a panel is one contiguous
// stream that runs over K, so that a thread reads DRAM in order.
//   kBf16  pairs (k, k+1) of 32 columns: the operand order of vdpbf16ps, 128 bytes for two k
//   kQ8    groups of 32 k: 32 fp16 scales d, then int8 q; the weight is d*q
//   kQ4    groups of 32 k: 32 fp16 scales d, 32 fp16 offsets m, then 4-bit q; the weight is d*q + m
// Quantized panels are decoded to the kBf16 form in cache, rounding the exact weight to bf16 once: logits are bit
// for bit those of the same model dequantized to bf16 beforehand.
//   kU8    groups of 32 k: 32 fp16 scales d, then bytes u, four k of a column together; the weight is d*(u - 128)
//   kU4    groups of 32 k: 32 fp16 scales d, 32 fp16 offsets m, then 4-bit u; the weight is d*u + m
// These two are multiplied as integers, with activations rounded to 8 bits (quantize.h): twice the rate of bf16.
enum Format : int { kBf16 = 0, kQ8 = 1, kQ4 = 2, kU8 = 3, kU4 = 4 };
inline bool is_integer(int format) { return format == kU8 || format == kU4; }
constexpr int kU8Zero = 128;  // the byte that stands for a weight of 0

constexpr int kPanel = 32;
constexpr int kFewRows = 12;  // from here on decoding costs more than the memory traffic it saves
// From this many rows on, arithmetic bounds a product and DRAM has time for other things.
constexpr int kBusyRows = 24, kBusyQuantizedRows = 4;

struct Form {
    int format = kBf16;
    const uint8_t* panels = nullptr;
};

struct Linear {
    int n = 0;  // output columns; the last panel is padded with zeros
    int k = 0;  // a multiple of 32
    Form main;
    Form few;  // optional second form of the same weights, quicker where few rows make memory the bound
    const float* bias = nullptr;  // [n] or null
    const Form& form(int rows) const { return few.panels && rows <= kFewRows ? few : main; }
    bool leaves_dram_idle(int rows) const {
        return rows >= (form(rows).format == kBf16 ? kBusyRows : kBusyQuantizedRows);
    }
};

inline int num_panels(int n) { return (n + kPanel - 1) / kPanel; }

constexpr size_t group_bytes(int format) {
    if (format == kQ8 || format == kU8) return 64 + kGroup * kPanel;
    if (format == kQ4 || format == kU4) return 128 + kGroup * kPanel / 2;
    return kGroup * kPanel * sizeof(bf16);
}

inline size_t panel_bytes(int format, int k) { return static_cast<size_t>(k) / kGroup * group_bytes(format); }

// Packs columns first_panel*32 .. of a row-major bf16 matrix [n, k]. With `paired`, rows 0..n/2-1 are gates and the
// others ups; a panel then holds 16 gates and their 16 ups.
void pack_bf16(uint8_t* panels, const bf16* weights, int n, int k, bool paired, int first_panel, int last_panel);
// The same from fp32 to kQ8 or kU8: symmetric, one scale per 32 weights of a row, nearest.
void pack_int8(uint8_t* panels, int format, const float* weights, int n, int k, bool paired, int first_panel,
               int last_panel);
// From GGUF rows as they are in the file: Q8_0 {fp16 d; int8 q[32]}, Q4_0 {fp16 d; nibbles[16]}, Q4_1 {fp16 d, m; ...}.
enum GgufType : int { kGgufQ4_0 = 2, kGgufQ4_1 = 3, kGgufQ8_0 = 8 };
void pack_gguf(uint8_t* panels, int format, const uint8_t* rows, int type, int n, int k, bool paired, int first_panel,
               int last_panel);
enum class Epilogue {
    kStore,    // out = y + bias
    kAdd,      // out += y + bias (the residual stream)
    kSiluMul,  // bf16 out = silu(gate) * up, on paired panels
    kGeluMul,  // bf16 out = gelu_tanh(gate) * up
    kRotate,   // out = y + bias goes where `rotation` puts it
    kLogits,   // out = y (out may be null), and the running argmax
};

struct Best {
    float value;  // infinite where there is none: a logit is no number, or the largest is not finite
    int index;
};

struct Rotation;  // rotate.h

struct GemmJob {
    const Linear* weight;
    const bf16* x;         // [m, k]
    IntegerRows integers;  // the same for integer weights
    int m;
    Epilogue epilogue;
    void* out;  // float or bf16 [m, ld]; with kRotate none
    int ld;
    Best* best = nullptr;                 // [m] of this thread, for kLogits
    const uint8_t* next_phase = nullptr;  // weights that this thread will want after this product
    KvPages kv_ahead = {};                // that attention will read after it
    const Rotation* rotation = nullptr;   // with kRotate
};

// One thread's part of a phase. `scratch` holds k*32 bf16 values, used for quantized weights.
void gemm(Phases& phases, int thread, const GemmJob& job, bf16* scratch);
// What to pass to Phases::begin.
int gemm_items(const Linear& weight, int m);
// The first panel that `thread` will take in a product with `weight`.
const uint8_t* first_panel(const Linear& weight, int m, int thread, int threads);

}  // namespace ns

// Rows of activations as 8-bit integers, for products with integer weights.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ns {

constexpr int kGroup = 32;  // k that share a scale, in activations and in quantized weights

// A value is far from this many root mean squares of its row on. On SmolLM2-135M 5 to 10 values in a hundred groups are,
// and the error of the logits is two thirds of what it is without.
constexpr float kFar = 7.f;
static_assert(kFar * kFar > kGroup, "or a row's far values could outnumber its groups");

struct GroupScale {
    float scale;
    float sum;     // scale times the sum of the group's integers: what an offset of the weights is multiplied with
    uint32_t far;  // bit k: value k is not among the integers but apart
    uint32_t first;  // of its far values in the row's list
};

// Row by row: int8 q[k], GroupScale[k/32], and the far values in order, behind a 0. A value is scale * q, or far.
//
// Far are the values that stand out of their row: a few channels of a transformer's residual stream do in every token
// (Dettmers et al. 2022, arXiv:2208.07339, who multiply those columns apart, too). Among the integers they would make
// the step of their whole group coarse. Of squares over kFar^2 times their mean there are fewer than k / kFar^2.
class IntegerRows {
 public:
    IntegerRows() = default;
    IntegerRows(uint8_t* memory, int k) : memory_(memory), k_(k) {}
    static size_t stride(int k) {
        const size_t count = static_cast<size_t>(k);
        return (count + count / kGroup * (sizeof(GroupScale) + sizeof(float)) + sizeof(float) + 63) / 64 * 64;
    }
    int8_t* quants(int row) const { return reinterpret_cast<int8_t*>(memory_ + row * stride(k_)); }
    GroupScale* scales(int row) const { return reinterpret_cast<GroupScale*>(quants(row) + k_); }
    float* far(int row) const { return reinterpret_cast<float*>(scales(row) + k_ / kGroup); }
    // x: k floats. A group with a value that is infinite or no number gets such a scale; one with values up to 1e-30 is 0.
    // A group's sum must be finite, too: from 1e36 on it may not be.
    void write(int row, const float* x) const;

 private:
    uint8_t* memory_ = nullptr;
    int k_ = 0;
};

}  // namespace ns

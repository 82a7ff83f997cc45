// Rows of activations as 8-bit integers, for products with integer weights.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ns {

constexpr int kGroup = 32;  // k that share a scale, in activations and in quantized weights

struct GroupScale {
    float scale;
    float sum;     // scale times the sum of the group's integers: what an offset of the weights is multiplied with
    uint32_t far;  // bit k: value k is not among the integers but apart
    uint32_t unused;
};

// Row by row: int8 q[k], float far[k], GroupScale[k/32]. A value is scale * q + far, where one of q and far is 0.
//
// Far are the values that stand out of their row: a few channels of a transformer's residual stream do in every token
// (Dettmers et al. 2022, arXiv:2208.07339, who multiply those columns apart, too). Among the integers they would make
// the step of their whole group coarse.
class IntegerRows {
 public:
    IntegerRows() = default;
    IntegerRows(uint8_t* memory, int k) : memory_(memory), k_(k) {}
    static size_t stride(int k) {
        const size_t count = static_cast<size_t>(k);
        return (count * (1 + sizeof(float)) + count / kGroup * sizeof(GroupScale) + 63) / 64 * 64;
    }
    int8_t* quants(int row) const { return reinterpret_cast<int8_t*>(memory_ + row * stride(k_)); }
    float* far(int row) const { return reinterpret_cast<float*>(quants(row) + k_); }
    GroupScale* scales(int row) const { return reinterpret_cast<GroupScale*>(far(row) + k_); }
    // x: k floats. A group with a value that is no number gets a scale that is none.
    void write(int row, const float* x) const;

 private:
    uint8_t* memory_ = nullptr;
    int k_ = 0;
};

}  // namespace ns

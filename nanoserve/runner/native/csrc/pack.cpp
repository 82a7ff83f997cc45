// Bringing weights into panels, and quantized panels back to bf16.
#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace ns {
namespace {

// The source row of output column `column`, or -1 for padding.
int source_row(int column, int n, bool paired) {
    if (column >= n) return -1;
    if (!paired) return column;
    const int lane = column % kPanel, first = column / kPanel * (kPanel / 2);
    return lane < 16 ? first + lane : n / 2 + first + lane - 16;
}

constexpr uint16_t kHalfNan = 0x7e00;
uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// Where the quants of one group lie: scales first, then offsets of 4-bit ones, then q.
struct Group {
    uint8_t* base;
    int format;
    // In kU8 and kU4 four k of a column make a dword, sixteen columns 64 bytes.
    static int dword(int column, int four) { return (four * 2 + column / 16) * 64 + column % 16 * 4; }
    void set_scale(int column, uint16_t d) const { std::memcpy(base + column * 2, &d, 2); }
    void set_offset(int column, uint16_t m) const { std::memcpy(base + 64 + column * 2, &m, 2); }
    void set_q8(int column, int k, int8_t q) const {
        if (format == kU8) {
            base[64 + dword(column, k / 4) + k % 4] = static_cast<uint8_t>(q + kU8Zero);
            return;
        }
        base[64 + k / 2 * (2 * kPanel) + column * 2 + k % 2] = static_cast<uint8_t>(q);
    }
    // kQ4: eight columns and 16 k share 64 bytes; dword (column, parity of k) holds the eight k of that parity. kU4: the
    // low halves of bytes hold the first four of eight k, the high halves the others.
    void set_q4(int column, int k, int q) const {
        if (format == kU4) {
            uint8_t& byte = base[128 + dword(column, k / 8) + k % 4];
            byte = static_cast<uint8_t>(byte | q << (k % 8 / 4 * 4));
            return;
        }
        uint8_t* block = base + 128 + (k / 16 * 4 + column / 8) * 64 + (column % 8 * 2 + k % 2) * 4;
        const int nibble = k % 16 / 2;
        block[nibble / 2] = static_cast<uint8_t>(block[nibble / 2] | q << (nibble % 2 * 4));
    }
};

struct GroupWriter {
    uint8_t* panels;
    int format, k;
    Group at(int panel, int group) const {
        const size_t bytes = panel_bytes(format, k);
        return {panels + panel * bytes + group * (bytes / (k / kGroup)), format};
    }
};

uint16_t read16(const uint8_t* source) {
    uint16_t value;
    std::memcpy(&value, source, 2);
    return value;
}

void put_gguf_group(const Group& group, int column, int type, const uint8_t* block) {
    const uint16_t d = read16(block);
    group.set_scale(column, d);
    if (type == kGgufQ8_0) {
        for (int k = 0; k < kGroup; ++k) group.set_q8(column, k, static_cast<int8_t>(block[2 + k]));
        return;
    }
    const bool has_offset = type == kGgufQ4_1;
    // Q4_0 means d*(q - 8); -8d is exact in fp16, so both forms give the same weight.
    group.set_offset(column, has_offset ? read16(block + 2) : to_half(-8.f * _cvtsh_ss(d)));
    const uint8_t* nibbles = block + (has_offset ? 4 : 2);
    for (int k = 0; k < kGroup; ++k) group.set_q4(column, k, k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4);
}

size_t gguf_block_bytes(int type) { return type == kGgufQ8_0 ? 34 : type == kGgufQ4_1 ? 20 : 18; }

}  // namespace

void pack_bf16(uint8_t* panels, const bf16* weights, int n, int k, bool paired, int first_panel, int last_panel) {
    for (int panel = first_panel; panel < last_panel; ++panel) {
        uint32_t* target = reinterpret_cast<uint32_t*>(panels + panel * panel_bytes(kBf16, k));
        for (int lane = 0; lane < kPanel; ++lane) {
            const int row = source_row(panel * kPanel + lane, n, paired);
            const bf16* source = weights + static_cast<size_t>(std::max(row, 0)) * k;
            for (int pair = 0; pair < k / 2; ++pair) {
                uint32_t both = 0;
                if (row >= 0) std::memcpy(&both, source + 2 * pair, 4);
                target[pair * kPanel + lane] = both;
            }
        }
    }
}

void pack_int8(uint8_t* panels, int format, const float* weights, int n, int k, bool paired, int first_panel,
               int last_panel) {
    const GroupWriter writer{panels, format, k};
    for (int panel = first_panel; panel < last_panel; ++panel) {
        std::memset(panels + panel * panel_bytes(format, k), 0, panel_bytes(format, k));
        for (int lane = 0; lane < kPanel; ++lane) {
            const int row = source_row(panel * kPanel + lane, n, paired);
            if (row < 0) continue;
            for (int group = 0; group < k / kGroup; ++group) {
                const float* source = weights + static_cast<size_t>(row) * k + group * kGroup;
                float top = 0;
                bool finite = true;  // a maximum passes over what is no number: such a group must not become zeros
                for (int j = 0; j < kGroup; ++j) {
                    top = std::max(top, std::fabs(source[j]));
                    finite = finite && std::isfinite(source[j]);
                }
                const uint16_t d = finite ? to_half(top / 127.f) : kHalfNan;
                const float rounded = _cvtsh_ss(d);  // quantize for the scale that is kept, not for the ideal one
                writer.at(panel, group).set_scale(lane, d);
                for (int j = 0; j < kGroup; ++j) {
                    const float q = rounded > 0 ? std::nearbyint(source[j] / rounded) : 0.f;
                    writer.at(panel, group).set_q8(lane, j, static_cast<int8_t>(std::clamp(q, -127.f, 127.f)));
                }
            }
        }
    }
}

void pack_gguf(uint8_t* panels, int format, const uint8_t* rows, int type, int n, int k, bool paired, int first_panel,
               int last_panel) {
    const size_t block = gguf_block_bytes(type);
    const GroupWriter writer{panels, format, k};
    for (int panel = first_panel; panel < last_panel; ++panel) {
        std::memset(panels + panel * panel_bytes(format, k), 0, panel_bytes(format, k));
        for (int lane = 0; lane < kPanel; ++lane) {
            const int row = source_row(panel * kPanel + lane, n, paired);
            if (row < 0) continue;
            const uint8_t* source = rows + static_cast<size_t>(row) * (k / kGroup) * block;
            for (int group = 0; group < k / kGroup; ++group, source += block)
                put_gguf_group(writer.at(panel, group), lane, type, source);
        }
    }
}

}  // namespace ns

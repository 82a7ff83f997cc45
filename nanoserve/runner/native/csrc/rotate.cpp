#include "rotate.h"

#include "gemm.h"
#include "norm.h"

namespace ns {

// write(i, values) for dimensions begin..end-1 of a head's first half, and those opposite: `source` holds them in the
// product's order.
template <class Write>
void Rotation::turn(int token, const float* source, int begin, int end, Write write) const {
    const int half = shape.head_dim / 2;
    const float* cosines = layer.rope_cos + static_cast<size_t>(positions[token]) * half;
    const float* sines = layer.rope_sin + static_cast<size_t>(positions[token]) * half;
    for (int i = begin; i < end; i += 16, source += kPanel) {
        const __m512 a = _mm512_loadu_ps(source), b = _mm512_loadu_ps(source + 16);
        const __m512 c = _mm512_loadu_ps(cosines + i), s = _mm512_loadu_ps(sines + i);
        write(i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        write(i + half, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

// How many tokens from `token` on, at most `most`, come one behind the other in one page.
int Rotation::neighbours(int token, int most) const {
    int count = 1;
    while (count < most && page_table[token + count] == page_table[token] && slot(token + count) == slot(token) + count)
        ++count;
    return count;
}

void Rotation::write_panel(int panel, int first, int count, float* sums) const {
    const int panels = shape.head_dim / kPanel, head = panel / panels, place = panel % panels * 16;
    if (head < shape.num_heads) {
        const __m512 scale = _mm512_set1_ps(query_scale);
        for (int token = first; token < first + count; ++token, sums += kPanel) {
            bf16* target = queries + (static_cast<size_t>(token) * shape.num_heads + head) * shape.head_dim;
            turn(token, sums, place, place + 16,
                 [&](int i, __m512 v) { store_bf16(target + i, _mm512_mul_ps(v, scale)); });
        }
        return;
    }
    const int kv_head = (head - shape.num_heads) % shape.num_kv_heads;
    const bool is_key = head < shape.num_heads + shape.num_kv_heads;
    for (int token = first, end = first + count, together; token < end; token += together, sums += together * kPanel) {
        together = neighbours(token, end - token);
        uint8_t* page = head_page(token, kv_head);
        if (is_key) {
            for (int i = 0; i < together; ++i) {
                float* key = sums + i * kPanel;
                turn(token + i, key, place, place + 16,
                     [&](int d, __m512 v) { _mm512_storeu_ps(key + (d == place ? 0 : 16), v); });
            }
            write_key_parts(page, slot(token), together, place, sums, kPanel);
            write_key_parts(page, slot(token), together, place + shape.head_dim / 2, sums + 16, kPanel);
        } else {
            for (int i = 0; i < kPanel; i += 16)
                write_value_parts(shape, page, slot(token), together, 2 * place + i, sums + i, kPanel);
        }
    }
}

void Rotation::write_head(int kv_head, int token, const float* row) const {
    const int head_dim = shape.head_dim, half = head_dim / 2, group = shape.group();
    float head[kMaxHeadDim];
    auto turn_whole = [&](const float* source, const float* norm, auto&& write) {
        if (norm) {
            rms_norm(source, norm, head_dim, norm_eps, [&](int i, __m512 v) { _mm512_storeu_ps(head + i, v); });
            source = head;
        }
        turn(token, source, 0, half, write);
    };
    const __m512 scale = _mm512_set1_ps(query_scale);
    for (int query = kv_head * group; query < (kv_head + 1) * group; ++query) {
        bf16* target = queries + (static_cast<size_t>(token) * shape.num_heads + query) * head_dim;
        turn_whole(row + query * head_dim, layer.q_norm,
                   [&](int i, __m512 v) { store_bf16(target + i, _mm512_mul_ps(v, scale)); });
    }
    const float* key = row + static_cast<size_t>(shape.num_heads + kv_head) * head_dim;
    const float* value = key + static_cast<size_t>(shape.num_kv_heads) * head_dim;
    float turned[kMaxHeadDim];
    turn_whole(key, layer.k_norm, [&](int i, __m512 v) { _mm512_storeu_ps(turned + i, v); });
    write_kv(shape, head_page(token, kv_head), slot(token), turned, value);
}

}  // namespace ns

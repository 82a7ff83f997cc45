"""The plain torch decoder of all families: weights by name in, hidden states out. Owner: `torch_backend`.

What differs between families is in their `ModelSpec`; the few branches below are those differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanoserve.obs.memory import claim
from nanoserve.runner.layers import GatedMLP, RMSNorm, Rotary, rotate
from nanoserve.runner.models.spec import LayerSpec, ModelSpec, RopeSpec

Angles = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [T, heads, dim], key [T, kv_heads, dim], value) -> [T, heads, dim]; also stores key and value."""

Weights = dict[str, torch.Tensor]


@dataclass(slots=True)
class _Layer:
    spec: LayerSpec
    input_norm: RMSNorm
    qkv: torch.Tensor  # [q + k + v, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: torch.Tensor
    mlp_norm: RMSNorm
    mlp: GatedMLP
    attention_out_norm: RMSNorm | None  # the two norms that Gemma puts behind attention and MLP
    mlp_out_norm: RMSNorm | None


class Decoder:
    """Owns the weights. `weights` is emptied as its tensors are fused, so that the peak stays near one copy."""

    def __init__(self, spec: ModelSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._take = _Taker(weights, dtype, device)
        self._embedding = self._take("model.embed_tokens.weight")
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype, device=device)
        self._layers = [self._make_layer(index, layer) for index, layer in enumerate(spec.layers)]
        self._norm = self._make_norm("model.norm.weight")
        self._head = self._embedding if spec.tie_word_embeddings else self._take("lm_head.weight")
        self._rotaries = {layer.rope: Rotary(layer.rope, spec.head_dim, device) for layer in spec.layers}

    def _make_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._take(name), self._spec.rms_norm_eps, self._spec.norm_offset)

    def _make_layer(self, index: int, layer: LayerSpec) -> _Layer:
        spec, take, prefix = self._spec, self._take, f"model.layers.{index}."
        qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        # The tensor names are the checkpoint's: in Gemma "post_attention" really is behind the attention,
        # in all others it is the norm before the MLP.
        after = prefix + "post_attention_layernorm.weight"
        before_mlp = prefix + "pre_feedforward_layernorm.weight" if spec.sandwich_norms else after
        return _Layer(
            spec=layer,
            input_norm=self._make_norm(prefix + "input_layernorm.weight"),
            qkv=take.joined([name + ".weight" for name in qkv]),
            qkv_bias=take.joined([name + ".bias" for name in qkv]) if spec.qkv_bias else None,
            q_norm=self._make_norm(prefix + "self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=self._make_norm(prefix + "self_attn.k_norm.weight") if spec.qk_norm else None,
            output=take(prefix + "self_attn.o_proj.weight"),
            attention_out_norm=self._make_norm(after) if spec.sandwich_norms else None,
            mlp_norm=self._make_norm(before_mlp),
            mlp=GatedMLP(
                take.joined([prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"]),
                take(prefix + "mlp.down_proj.weight"),
                spec.activation,
            ),
            mlp_out_norm=(
                self._make_norm(prefix + "post_feedforward_layernorm.weight") if spec.sandwich_norms else None
            ),
        )

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """token_ids, positions int64 [T] -> hidden states [T, hidden_size] before the last norm."""
        x = F.embedding(token_ids, self._embedding)
        if self._spec.embedding_scale != 1.0:
            x = x * self._embedding_scale
        angles = {rope: rotary.angles(positions) for rope, rotary in self._rotaries.items()}
        for index, layer in enumerate(self._layers):
            x = self._run_layer(index, layer, x, angles, attend)
        return x

    def _run_layer(
        self, index: int, layer: _Layer, x: torch.Tensor, angles: dict[RopeSpec, Angles], attend: Attend
    ) -> torch.Tensor:
        mixed = self._attention(index, layer, layer.input_norm(x), angles[layer.spec.rope], attend)
        x = x + (layer.attention_out_norm(mixed) if layer.attention_out_norm else mixed)
        made = layer.mlp(layer.mlp_norm(x))
        return x + (layer.mlp_out_norm(made) if layer.mlp_out_norm else made)

    def _attention(self, index: int, layer: _Layer, x: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        spec, num_tokens = self._spec, x.shape[0]
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        query, key, value = qkv.split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        query = query.view(num_tokens, spec.num_heads, spec.head_dim)
        key = key.view(num_tokens, spec.num_kv_heads, spec.head_dim)
        value = value.view(num_tokens, spec.num_kv_heads, spec.head_dim)
        if layer.q_norm and layer.k_norm:
            query, key = layer.q_norm(query), layer.k_norm(key)
        mixed = attend(index, rotate(query, angles), rotate(key, angles), value)
        return F.linear(mixed.reshape(num_tokens, spec.q_size), layer.output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> float32 [S, vocab_size]."""
        logits = F.linear(self._norm(hidden), self._head).float()
        cap = self._spec.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    @property
    def weights_bytes(self) -> int:
        return self._take.num_bytes

    def matrices(self) -> list[torch.Tensor]:
        """The distinct shapes of weight matrices, one of each (the backend checks their kernels)."""
        first = self._layers[0]
        return [first.qkv, first.output, *first.mlp.matrices(), self._head]


class _Taker:
    """Takes tensors out of the dict, in the compute type and on the device."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self.num_bytes = 0  # taken so far

    def __call__(self, name: str) -> torch.Tensor:
        return self._claimed(self._take(name))

    def joined(self, names: list[str]) -> torch.Tensor:
        return self._claimed(torch.cat([self._take(name) for name in names]))

    def _take(self, name: str) -> torch.Tensor:
        return self._weights.pop(name).to(device=self._device, dtype=self._dtype)

    def _claimed(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        if self._device.type == "cpu":
            claim("weights", tensor.data_ptr(), tensor.nbytes)
        return tensor

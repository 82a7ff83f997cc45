"""Small random models of every family in sizes that the C++ engine takes, both backends over the same weights, and
what the tests of keys and values in either form ask of them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from nanoserve.runner.backend import ForwardBackend, ForwardBatch
from nanoserve.runner.models import read_model_spec
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.native.backend import NativeBackend, NativeOptions
from nanoserve.runner.native.library import Format, Linear, SourceType
from nanoserve.runner.native.memory import allocate
from nanoserve.runner.native.packing import Weights
from nanoserve.runner.torch_backend import TorchBackend
from tests.runner.tiny import Sequences

VOCAB = 139  # no multiple of 32: the last panel of the output layer is part padding
IDS: list[int] = np.random.default_rng(7).integers(0, VOCAB, 1400).tolist()
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
_GEMMA = {
    "query_pre_attn_scalar": 48,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "architectures": ["LlamaForCausalLM"]},
    "llama-mha-tied": {
        **_BASE, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 6, "tie_word_embeddings": True,
    },
    "llama-mqa-9": {
        **_BASE, "architectures": ["LlamaForCausalLM"], "num_attention_heads": 9, "num_key_value_heads": 1,
    },
    "mistral": {**_BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 40},
    "mistral-long-window": {**_BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 300},
    "qwen2": {**_BASE, "architectures": ["Qwen2ForCausalLM"], "head_dim": 64},
    "qwen3": {**_BASE, "architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
    "gemma3": {**_BASE, **_GEMMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 96},
    "gemma3-256": {**_BASE, **_GEMMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 256},
}  # fmt: skip


def make_spec(name: str, **changes: Any) -> ModelSpec:
    return read_model_spec({**CONFIGS[name], **changes})


def make_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """bfloat16, so that both backends start from the same numbers; norms and biases random too."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in spec.tensor_shapes().items():
        tensor = torch.randn(shape, generator=generator) * 0.25
        if name.endswith("norm.weight"):
            tensor = tensor + 1.0 - spec.norm_offset
        weights[name] = tensor.to(torch.bfloat16)
    return weights


def make_native(spec: ModelSpec, *, num_blocks: int = 160, seed: int = 0, **options: Any) -> NativeBackend:
    settings = NativeOptions(**{"threads": 2, **options})
    backend = NativeBackend(spec, lambda: Weights(make_weights(spec, seed), {}), settings)
    backend.allocate_kv(num_blocks)
    return backend


def make_torch(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    num_blocks: int = 160,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
) -> TorchBackend:
    weights = make_weights(spec)
    device = torch.device("cpu")
    backend = TorchBackend(spec, weights, block_size=block_size, dtype=dtype, device=device, kv_dtype=kv_dtype)
    backend.allocate_kv(num_blocks)
    return backend


def logits_of(backend: ForwardBackend, chunks: list[int]) -> torch.Tensor:
    """Logits of every position of a sequence of the first IDS that is fed in the given chunks."""
    sequences = Sequences(backend, 16, 160)
    index, parts, start = sequences.add(IDS[: sum(chunks)]), [], 0
    for count in chunks:
        parts += [part.clone() for part in sequences.run([(index, start, count)])]
        start += count
    return torch.cat(parts)


def error_of(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


def check_company(backend: ForwardBackend) -> None:
    """A step of decodes, prefill chunks, a prompt behind a shared prefix and a row without new tokens: the logits of
    each are the bits of that sequence alone."""
    alone = logits_of(backend, [400])
    sequences = Sequences(backend, 16, 160, 3)
    rows = [sequences.add(IDS[:length]) for length in (17, 34, 300, 400, 64)]
    shared = sequences.add(IDS[:90], sequences.table(rows[3])[:4])
    sequences.run([(rows[0], 0, 16), (rows[1], 0, 33), (rows[3], 0, 380)])
    mixed = [
        (rows[0], 16, 1),
        (rows[1], 33, 1),  # the place in its block that would come after the row before
        (rows[2], 0, 137),
        (rows[3], 380, 0),
        (shared, 64, 26),
        (rows[3], 380, 20),
        (rows[4], 0, 64),
    ]
    as_many_tokens_as_rows = [(rows[0], 16, 0), (rows[1], 32, 2), (rows[2], 137, 0), (shared, 88, 2)]
    for step in (mixed, as_many_tokens_as_rows):
        for (_, start, count), part in zip(step, sequences.run(step), strict=True):
            assert torch.equal(part, alone[start : start + count])


def batch_of(ids: list[int], logit_tokens: list[int], table: list[int]) -> ForwardBatch:
    """The first tokens of one row."""
    return ForwardBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.arange(len(ids), dtype=np.int32),
        row_starts=np.array([0, len(ids)], np.int32),
        context_lens=np.array([len(ids)], np.int32),
        block_tables=np.array([table], np.int32),
        logit_tokens=np.array(logit_tokens, np.int32),
    )


def check_broken_row(backend: NativeBackend) -> None:
    """A row of NaN beside a good one, then its blocks used again by another request."""
    alone = logits_of(backend, [20])
    poison, row_bytes = VOCAB - 1, backend._spec.hidden_size * 2
    start = backend._packed.sections["embedding"].offset + poison * row_bytes
    backend._packed.memory[start : start + row_bytes] = 0xFF  # NaN in bfloat16
    sequences = Sequences(backend, 16, 160, 5)
    good, bad = sequences.add(IDS[:20]), sequences.add([*IDS[:3], *[poison] * 13, *IDS[3:6]])
    parts = sequences.run([(bad, 0, 19), (good, 0, 20)])
    assert torch.isnan(parts[0][3:]).all() and torch.equal(parts[1], alone)
    assert (backend.greedy_ids[3:19] == -1).all() and (backend.greedy_ids[19:] >= 0).all()
    again = backend.forward(batch_of(IDS[:18], list(range(18)), sequences.table(bad)))
    assert torch.equal(again, alone[:18])


class PackedMatrix:
    """One packed matrix; keeps its memory alive."""

    def __init__(
        self, library: ctypes.CDLL, source: np.ndarray, kind: SourceType, form: Format, n: int, k: int
    ) -> None:
        self._library, self._n = library, n
        self._memory = allocate(int(library.ns_packed_bytes(form, n, k)))
        library.ns_pack(self._memory.ctypes.data, form, source.ctypes.data, kind, n, k, 0, 2)
        self._linear = Linear(n=n, k=k, format=form, panels=self._memory.ctypes.data)

    def times(self, x: torch.Tensor, threads: int = 2) -> torch.Tensor:
        out = torch.empty(x.shape[0], -(-self._n // 32) * 32)
        self._library.ns_matmul(ctypes.byref(self._linear), x.data_ptr(), x.shape[0], out.data_ptr(), threads)
        return out[:, : self._n]

"""Tiny random models of every family, made by transformers, and a paged batch builder for backends under test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from nanoserve.runner.backend import ForwardBackend, ForwardBatch
from nanoserve.runner.models import read_model_spec
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.torch_backend import TorchBackend

VOCAB = 128
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {**_BASE, "query_pre_attn_scalar": 24, "sliding_window": 20}
_QWEN2 = {key: value for key, value in _BASE.items() if key != "head_dim"}

CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**_BASE),
    "llama-tied-mqa": transformers.LlamaConfig(**{**_BASE, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama3-rope": transformers.LlamaConfig(**_BASE, rope_parameters=_LLAMA3),
    "linear-rope": transformers.LlamaConfig(
        **_BASE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": transformers.MistralConfig(**_BASE, sliding_window=20),
    "mistral-full": transformers.MistralConfig(**_BASE, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**_QWEN2),
    "qwen2-window": transformers.Qwen2Config(**_QWEN2, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**_BASE),
    "gemma3": transformers.Gemma3TextConfig(
        **_GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gemma3-scaled": transformers.Gemma3TextConfig(
        **_GEMMA,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
        final_logit_softcapping=5.0,
        attn_logit_softcapping=7.0,
    ),
}


def make_reference(name: str, seed: int = 0) -> Any:
    """A transformers model with random weights; biases and norms are random too, else a mistake could hide."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                center = 0.0 if "gemma" in name or parameter_name.endswith("bias") else 1.0
                parameter.copy_(center + 0.3 * torch.randn_like(parameter))
    return model


def config_dict(reference: Any) -> dict[str, Any]:
    return {**reference.config.to_dict(), "architectures": [type(reference).__name__]}


def make_spec(reference: Any) -> ModelSpec:
    return read_model_spec(config_dict(reference))


def make_weights(reference: Any, spec: ModelSpec) -> dict[str, torch.Tensor]:
    state = reference.state_dict()
    return {name: state[name].clone() for name in spec.tensor_shapes()}


def make_backend(reference: Any, *, block_size: int = 4, num_blocks: int = 256) -> TorchBackend:
    spec = make_spec(reference)
    backend = TorchBackend(
        spec,
        make_weights(reference, spec),
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    backend.allocate_kv(num_blocks)
    return backend


def reference_logits(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocab] of one pass over the whole sequence.

    transformers' Gemma 3 reads attn_logit_softcapping but hands it to no layer; its attention takes it as `softcap`.
    """
    softcap = getattr(reference.config, "attn_logit_softcapping", None)
    extra = {"softcap": softcap} if softcap else {}
    with torch.inference_mode():
        return reference(torch.tensor([list(ids)]), **extra).logits[0].float()


class Sequences:
    """Token sequences with block tables of random, disjoint blocks; feeds a backend any chunks of them."""

    def __init__(self, backend: ForwardBackend, block_size: int, num_blocks: int, seed: int = 0) -> None:
        self._backend = backend
        self._block_size = block_size
        self._free = list(np.random.default_rng(seed).permutation(num_blocks))
        self._ids: list[list[int]] = []
        self._tables: list[list[int]] = []

    def add(self, ids: Sequence[int], shared_blocks: Sequence[int] = ()) -> int:
        blocks = -(-len(ids) // self._block_size) - len(shared_blocks)
        self._ids.append(list(ids))
        self._tables.append([*shared_blocks, *(int(self._free.pop()) for _ in range(blocks))])
        return len(self._ids) - 1

    def table(self, sequence: int) -> list[int]:
        return self._tables[sequence]

    def run(self, chunks: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """One forward over (sequence, first position, number of tokens) rows; logits of all tokens of each row."""
        counts = [count for _, _, count in chunks]
        width = max(len(self._tables[s]) for s, _, _ in chunks)
        tables = np.zeros((len(chunks), width), dtype=np.int32)
        for row, (sequence, _, _) in enumerate(chunks):
            tables[row, : len(self._tables[sequence])] = self._tables[sequence]
        batch = ForwardBatch(
            token_ids=np.array([t for s, p, n in chunks for t in self._ids[s][p : p + n]], dtype=np.int32),
            positions=np.array([p + i for _, p, n in chunks for i in range(n)], dtype=np.int32),
            row_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array([p + n for _, p, n in chunks], dtype=np.int32),
            block_tables=tables,
            logit_tokens=np.arange(sum(counts), dtype=np.int32),
        )
        return list(self._backend.forward(batch).split(counts))

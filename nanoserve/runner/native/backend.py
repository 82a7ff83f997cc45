"""`ForwardBackend` on the C++ engine. Owner: the engine process; made by `executor`.

One forward is one foreign call. A row's logits are the same bits alone, in any batch, in chunks, after a prefix hit
and after preemption: every kernel adds a row's terms in one fixed order (csrc/gemm.h, csrc/attention.h).
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoserve.runner.backend import ForwardBatch, Int32
from nanoserve.runner.kv_cache import bytes_per_block
from nanoserve.runner.models.spec import ModelSpec, RopeSpec
from nanoserve.runner.native import build, draw, packing
from nanoserve.runner.native.library import Batch, BatchFault, Config, KvFormat, Layer, Linear, SourceType, load_library
from nanoserve.runner.native.memory import allocate
from nanoserve.runner.native.packed_file import load_packed, save_packed
from nanoserve.runner.native.prefault import LEAST_BYTES, Prefault
from nanoserve.runner.sampler import SampleRows

_PAGE_TOKENS = 16
_LINE_FLOATS = 16  # of a cache line
_KEPT_LOGIT_ROWS = 128
_MAX_HEAD_DIM = 1024  # rotate_head keeps one head on its stack
_LAYER_MATRICES = ("qkv", "output", "gate_up", "down")
_LAYER_VECTORS = ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm", "q_norm", "k_norm")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """What an operator or the model directory decides. `fingerprint` names the model's files for the cache of
    packed weights (`packed_file.fingerprint`); empty: no such cache."""

    block_size: int = 16
    threads: int = 0  # 0: one per core
    max_positions: int = 0  # longest context; 0: the model's own
    quantization: str = "auto"  # packing.choose_formats
    kv_dtype: torch.dtype = torch.bfloat16  # or int8
    cache_dir: Path = field(default_factory=build.default_cache_dir)
    fingerprint: str = ""


def unsupported_reason(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the engine cannot run this model, as the end of a sentence; None when it can (a compiler permitting)."""
    if dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {str(dtype).removeprefix('torch.')}"
    missing = build.missing_cpu_features()
    if missing:
        return f"the CPU lacks {', '.join(missing)}"
    if block_size % _PAGE_TOKENS:
        return f"the block size {block_size} is no multiple of {_PAGE_TOKENS}"
    if spec.attention_softcap or spec.final_softcap:
        return "it has no soft-capped scores or logits"
    if spec.activation not in ("silu", "gelu_tanh"):
        return f"it has no activation {spec.activation}"
    for name, size in (("head", spec.head_dim), ("hidden", spec.hidden_size), ("MLP", spec.intermediate_size)):
        if size % 32:
            return f"the {name} size {size} is no multiple of 32"
    if spec.head_dim > _MAX_HEAD_DIM:
        return f"the head size {spec.head_dim} is over {_MAX_HEAD_DIM}"
    return None


@dataclass(frozen=True, slots=True)
class _Logits:
    """Room for the logits of a step, kept: fresh memory of this size costs a page fault every 4 KiB, 1-2 ms at 64 rows.

    What a step needs of it stands here as plain numbers: asking torch costs 30 us when caches are cold.
    """

    memory: torch.Tensor  # float32 [.., stride]
    tensor: torch.Tensor  # the step's part of it [rows, vocab_size]
    rows: int
    stride: int
    address: int

    @classmethod
    def of(cls, memory: torch.Tensor, rows: int, vocab_size: int) -> _Logits:
        return cls(memory, memory[:rows, :vocab_size], rows, memory.shape[1], memory.data_ptr())

    def resized(self, rows: int) -> _Logits:
        """Room for so many rows. Much more, as the scores of a prompt need, is not kept: 1 MiB a row with 262k ids."""
        fits = rows <= len(self.memory) <= max(4 * rows, _KEPT_LOGIT_ROWS)
        memory = self.memory if fits else torch.empty(rows, self.stride)
        return self.of(memory, rows, self.tensor.shape[1])


class NativeBackend:
    """Owns packed weights, KV memory and the threads. Raises `NativeUnavailable` when the library cannot be had.

    `load_weights`, and `read_kinds` for the GGUF block types it will give, are called only where no packed weights are
    cached. `progress` gets a stage and the done part of it.
    """

    name = "native"
    batch_invariant = True

    def __init__(
        self,
        spec: ModelSpec,
        load_weights: Callable[[], packing.Weights],
        options: NativeOptions,
        progress: Progress = lambda stage, part: None,
        read_kinds: Callable[[], Mapping[str, SourceType]] = dict,
    ) -> None:
        self._spec = spec
        self._options = options
        path = build.library_path(options.cache_dir, lambda part: progress("compiling the CPU engine", part))
        self._library = load_library(path)
        self._max_positions = options.max_positions or spec.max_position
        threads = options.threads or len(os.sched_getaffinity(0))
        self._packed = self._cached_or_packed(load_weights, read_kinds, path.stem, threads, progress)
        ropes = {layer.rope for layer in spec.layers}
        self._ropes = {rope: _rope_tables(rope, spec, self._max_positions) for rope in ropes}
        self._kv: np.ndarray | None = None
        self._prefault: Prefault | None = None
        self._logits = _Logits.of(torch.empty(0, _logit_stride(spec.vocab_size)), 0, spec.vocab_size)
        self.greedy_ids: Int32 = np.empty(0, np.int32)
        self._indices: Int32 = np.empty(0, np.int32)  # of the step that runs
        self._indices_address = 0
        self._model: int | None = self._make_model(threads)

    def kv_bytes_per_block(self) -> int:
        return bytes_per_block(self._spec, self._options.block_size, self._options.kv_dtype)

    def allocate_kv(self, num_blocks: int) -> None:
        # Zeros matter: a masked token's weight is 0, and 0 times whatever memory held could be NaN.
        self._kv = allocate(num_blocks * self.kv_bytes_per_block(), "kv cache")
        pages = num_blocks * self._options.block_size // _PAGE_TOKENS
        self._library.ns_model_set_kv(self._model, self._kv.ctypes.data, pages)
        if self._kv.nbytes >= LEAST_BYTES:
            self._prefault = Prefault(self._kv, self._spec.num_layers, num_blocks)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """One step: float32 logits [S, vocab_size], valid until the next call; `greedy_ids` are their argmax."""
        logits = self._logits_of(batch)
        self._run(batch, logits.address)
        return logits.tensor

    def forward_drawn(self, batch: ForwardBatch, rows: SampleRows) -> tuple[Int32, torch.Tensor]:
        """One step that ends with the draws: its threads are awake, and share them."""
        logits = self._logits_of(batch)
        asked, token_ids = draw.begin(logits.address, self._spec.vocab_size, logits.stride, rows)
        self._run(batch, logits.address, ctypes.byref(asked))
        return token_ids, logits.tensor

    def forward_greedy(self, batch: ForwardBatch) -> Int32:
        """One step that only tells the likeliest token of each logit row, -1 where the row is not finite."""
        self._run(batch, 0)
        return self.greedy_ids

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> Int32:
        return draw.choose(self._library, self._model, logits, rows)

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def weights_bytes(self) -> int:
        """Memory of the packed weights and the embedding."""
        return self._packed.num_bytes

    def read_bandwidth(self, memory: np.ndarray, threads: int) -> float:
        """GB/s of reading `memory` once with `threads` threads: what a memory-bound step can be compared with."""
        return float(self._library.ns_read_bandwidth(memory.ctypes.data, memory.nbytes, threads))

    def touch_kv(self) -> None:
        """For measurements: makes all KV memory real. What was never written reads as one page of zeros, in cache."""
        assert self._kv is not None
        self._kv[:] = 0

    def slow_thread(self, thread: int, microseconds: int) -> None:
        """For tests: that thread sleeps so long before one item in eight, as if another process had its core; -1: none.

        Thread 0 is the caller of `forward`."""
        self._library.ns_model_slow_thread(self._model, thread, microseconds)

    def close(self) -> None:
        """Ends the threads and gives the KV memory back. The backend is not used afterwards."""
        if self._prefault is not None:
            self._prefault.close()
            self._prefault = None
        if self._model is not None:
            self._library.ns_model_free(self._model)
            self._model = None
        self._kv = None

    def __del__(self) -> None:
        try:  # noqa: SIM105 - the name contextlib may be empty by now
            self.close()
        except AttributeError:  # a constructor that raised, or the end of the interpreter
            pass

    def _logits_of(self, batch: ForwardBatch) -> _Logits:
        rows = len(batch.logit_tokens)
        if rows != self._logits.rows:
            self._logits = self._logits.resized(rows)
        return self._logits

    def _run(self, batch: ForwardBatch, logits: int, draws: Any = None) -> None:
        assert self._kv is not None and self._model is not None, "allocate_kv comes first, close last"
        rows, width = batch.block_tables.shape
        greedy_ids = np.empty(len(batch.logit_tokens), np.int32)
        sizes = len(batch.token_ids), rows, width, len(greedy_ids), self._logits.stride, self._max_positions
        parts = (batch.token_ids, batch.positions, batch.row_starts, batch.block_tables.reshape(-1), batch.logit_tokens)
        ends = list(itertools.accumulate(map(len, parts), initial=0))
        if ends[-1] > len(self._indices):
            self._indices = np.empty(2 * ends[-1], np.int32)
            self._indices_address = self._indices.ctypes.data  # asking for it costs more than the copy below
        np.concatenate(parts, out=self._indices[: ends[-1]])
        raw = Batch(*sizes, -1, *(self._indices_address + 4 * end for end in ends[:-1]))
        if self._prefault is not None:
            self._prefault.begin_step()
        try:
            fault = self._library.ns_model_step(self._model, ctypes.byref(raw), logits, greedy_ids.ctypes.data, draws)
        finally:  # an interrupt is raised when the call is over
            if self._prefault is not None:
                self._prefault.end_step(raw.highest_block)
        if fault:
            raise self._error(BatchFault(fault))
        self.greedy_ids = greedy_ids

    def _error(self, fault: BatchFault) -> Exception:
        if fault is BatchFault.MEMORY:
            return MemoryError("no memory for a step")
        why = {
            BatchFault.TOKEN: "a token id is outside the vocabulary",
            BatchFault.POSITION: f"a position is outside the {self._max_positions} that were asked for",
            BatchFault.BLOCK: "a block table does not cover its context or names a block that does not exist",
        }
        return ValueError(why[fault])

    def _cached_or_packed(
        self,
        load_weights: Callable[[], packing.Weights],
        read_kinds: Callable[[], Mapping[str, SourceType]],
        library_key: str,
        threads: int,
        progress: Progress,
    ) -> packing.PackedWeights:
        """Packed weights from the cache, else from the checkpoint (and then into the cache)."""
        options = self._options
        prefix = f"packed-{options.fingerprint}-{options.quantization}-"
        cached = options.cache_dir / f"{prefix}{library_key}.bin"
        found = load_packed(cached, threads) if options.fingerprint else None
        if found is not None:
            return found
        formats = packing.choose_formats(self._spec, options.quantization, read_kinds())
        packed = packing.lay_out(self._library, self._spec, formats)
        packing.pack_weights(
            self._library, self._spec, packed, load_weights(), threads, lambda part: progress("packing weights", part)
        )
        if options.fingerprint:
            save_packed(packed, cached)
            # Made by another version of the engine. Not `prefix*`: that of int8 begins int8-dynamic's names, too.
            for old in options.cache_dir.glob(f"{prefix}engine-*.bin"):
                if old != cached:
                    old.unlink(missing_ok=True)
        return packed

    def _make_model(self, threads: int) -> int:
        spec = self._spec
        config = Config(
            hidden=spec.hidden_size,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            vocab=spec.vocab_size,
            gelu=spec.activation == "gelu_tanh",
            post_norms=spec.sandwich_norms,
            threads=threads,
            page_factor=self._options.block_size // _PAGE_TOKENS,
            kv_format=KvFormat[str(self._options.kv_dtype).removeprefix("torch.").upper()],
            norm_eps=spec.rms_norm_eps,
            embed_scale=spec.embedding_scale,
            attention_scale=spec.attention_scale,
        )
        shapes = packing.matrices(spec)
        packed = self._packed
        head = self._linear("head", shapes["head"])
        model = self._library.ns_model_new(
            ctypes.byref(config), packed.address("embedding"), ctypes.byref(head), packed.address("final_norm")
        )
        if not model:
            raise MemoryError("no memory for the model")
        for index, layer in enumerate(spec.layers):
            cosines, sines = self._ropes[layer.rope]
            raw = Layer(
                **{name: self._linear(f"{index}.{name}", shapes[f"{index}.{name}"]) for name in _LAYER_MATRICES},
                **{name: packed.address(f"{index}.{name}") for name in _LAYER_VECTORS},
                rope_cos=cosines.data_ptr(),
                rope_sin=sines.data_ptr(),
                window=layer.sliding_window,
            )
            self._library.ns_model_set_layer(model, index, ctypes.byref(raw))
        return int(model)

    def _linear(self, section: str, matrix: packing.Matrix) -> Linear:
        return Linear(
            n=matrix.n,
            k=matrix.k,
            format=self._packed.format(section),
            few_format=self._packed.format(f"{section}_few"),
            panels=self._packed.address(section),
            few_panels=self._packed.address(f"{section}_few"),
            bias=self._packed.address(f"{section}_bias"),
        )


def _logit_stride(vocab_size: int) -> int:
    """Floats from row to row of the logits: whole cache lines, and one more, because rows at a distance of a power of
    two would all lie in the same few sets of each cache."""
    return -(-vocab_size // _LINE_FLOATS) * _LINE_FLOATS + _LINE_FLOATS


def _rope_tables(rope: RopeSpec, spec: ModelSpec, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, head_dim/2], float32."""
    frequencies = torch.tensor(rope.inverse_frequencies(spec.head_dim), dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()

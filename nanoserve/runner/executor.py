"""From a configuration and a model directory to a ready executor. Runs once, in the engine process, at its start.

Decides what the configuration leaves open: device, compute type, backend, context length and KV blocks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from nanoserve.config import ServerConfig
from nanoserve.errors import ConfigError, StartupError
from nanoserve.hub.cache import cache_root
from nanoserve.hub.model_files import ModelFiles, read_model_files
from nanoserve.ipc.messages import EngineFacts
from nanoserve.runner.backend import ForwardBackend, ForwardBatch
from nanoserve.runner.batch import RequestTable
from nanoserve.runner.free_memory import free_memory
from nanoserve.runner.kv_cache import choose_kv_dtype, choose_num_blocks
from nanoserve.runner.loader import dummy_weights, load_weights
from nanoserve.runner.model_runner import ModelRunner
from nanoserve.runner.models import read_model_spec
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.torch_backend import TorchBackend

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_CPU_FLAGS = ("avx512_bf16", "amx_bf16")
_WARM_UP_TOKENS = 64


def create_executor(config: ServerConfig, model_dir: Path, progress: Progress) -> tuple[ModelRunner, EngineFacts]:
    """The executor of a real model and its facts; `progress` gets a stage and the share of it that is done.

    ConfigError or StartupError, one line, when the model cannot be served as asked.
    """
    files = read_model_files(model_dir, need_weights=config.model.load_format != "dummy")
    spec = read_model_spec(files.config)
    context = _context_limit(config, files)
    device = choose_device(config.engine.device)
    dtype = choose_dtype(config.model.dtype, device)
    torch.set_num_threads(config.engine.engine_threads or len(os.sched_getaffinity(0)))
    progress("loading weights", 0.0)
    backend = _make_backend(config, files, spec, dtype, device, context, progress)
    num_blocks = choose_num_blocks(
        config.cache,
        config.scheduler,
        block_bytes=backend.kv_bytes_per_block(),
        max_model_len=context,
        free_bytes=free_memory(device),
    )
    backend.allocate_kv(num_blocks)
    max_model_len = min(context, num_blocks * config.cache.block_size)
    if max_model_len < context:
        log.warning("KV memory holds %d tokens: the context is that long, not %d", max_model_len, context)
    progress("warming up", 0.0)
    _warm_up(backend, config, max_model_len)
    progress("warming up", 1.0)
    table = RequestTable(
        max_seqs=config.scheduler.max_num_seqs,
        max_tokens=max_model_len + 1,
        block_size=config.cache.block_size,
        vocab_size=spec.vocab_size,
    )
    facts = EngineFacts(
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        batch_invariant=backend.batch_invariant,
        attention_backend=backend.name,
        weights_bytes=backend.weights_bytes,
        kv_bytes=num_blocks * backend.kv_bytes_per_block(),
        kv_cache_dtype=str(choose_kv_dtype(config.cache.kv_cache_dtype, dtype)).removeprefix("torch."),
        num_parameters=spec.num_parameters(),
        context_bytes=_context_bytes(spec, backend.kv_bytes_per_block() // config.cache.block_size, max_model_len),
    )
    return ModelRunner(backend, table), facts


def _context_bytes(spec: ModelSpec, kv_bytes_per_token: int, max_model_len: int) -> int:
    num_whole = sum(not 0 < layer.sliding_window < max_model_len for layer in spec.layers)
    return kv_bytes_per_token * num_whole // spec.num_layers


def choose_device(name: str) -> torch.device:
    """ConfigError when a GPU is asked for and there is none."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no GPU")
    return torch.device("cuda", 0) if has_cuda and name != "cpu" else torch.device("cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type that was asked for; auto: bfloat16 where the device multiplies it natively, else float32."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if _cpu_flags() & set(_BF16_CPU_FLAGS) else torch.float32


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _context_limit(config: ServerConfig, files: ModelFiles) -> int:
    """Tokens, from the flag or the model."""
    asked, limit = config.model.max_model_len, files.context_length
    if asked > limit:
        raise ConfigError(f"--max-model-len {asked} is over the model's own {limit}")
    return asked or limit


def _make_backend(
    config: ServerConfig,
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    progress: Progress,
) -> ForwardBackend:
    def read(as_dtype: torch.dtype) -> dict[str, torch.Tensor]:
        def report(part: float) -> None:
            progress("loading weights", part)

        if config.model.load_format == "dummy":
            return dummy_weights(spec, as_dtype, config.model.seed, report)
        return load_weights(files.weight_files, spec, as_dtype, report)

    if device.type == "cpu" and config.engine.attention_backend == "auto":
        native = _native_backend(config, files, spec, dtype, context, read, progress)
        if native is not None:
            return native
    _check_torch_serves(config)
    block_size, kv_dtype = config.cache.block_size, choose_kv_dtype(config.cache.kv_cache_dtype, dtype)
    return TorchBackend(spec, read(dtype), block_size=block_size, dtype=dtype, device=device, kv_dtype=kv_dtype)


def _check_torch_serves(config: ServerConfig, why: str = "") -> None:
    if config.model.quantization not in ("auto", "none"):
        raise ConfigError(
            f"--quantization {config.model.quantization} needs the C++ engine, which is not used here{why}"
        )


def _native_backend(
    config: ServerConfig,
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    context: int,
    read: Callable[[torch.dtype], dict[str, torch.Tensor]],
    progress: Progress,
) -> ForwardBackend | None:
    """The C++ engine, or None, with one line in the log, where it cannot serve this model on this machine."""
    from nanoserve.runner.native.backend import NativeOptions, unsupported_reason
    from nanoserve.runner.native.build import NativeUnavailable
    from nanoserve.runner.native.open import open_native
    from nanoserve.runner.native.packed_file import fingerprint

    is_dummy = config.model.load_format == "dummy"
    reason = unsupported_reason(spec, dtype, config.cache.block_size)
    if reason is None:
        options = NativeOptions(
            block_size=config.cache.block_size,
            threads=config.engine.engine_threads,
            max_positions=context,
            quantization=config.model.quantization,
            kv_dtype=choose_kv_dtype(config.cache.kv_cache_dtype, dtype),
            cache_dir=cache_root(config.model) / "native",
            fingerprint="" if is_dummy else fingerprint(files.weight_files),
        )
        try:
            return open_native(files, spec, options, read, progress, has_blocks=not is_dummy)
        except NativeUnavailable as error:
            reason = str(error)
    _check_torch_serves(config, f" ({reason})")
    log.warning("the C++ engine is not used (%s); plain torch serves instead, slower", reason)
    return None


def _warm_up(backend: ForwardBackend, config: ServerConfig, max_model_len: int) -> None:
    """One prompt and one decode over the first blocks, so that the first request does not pay for lazy set-up.

    StartupError when the logits are not numbers: then the weights are broken.
    """
    block_size = config.cache.block_size
    length = max(1, min(_WARM_UP_TOKENS, config.scheduler.max_num_batched_tokens, max_model_len - 1))
    table = np.arange(-(-(length + 1) // block_size), dtype=np.int32)[None]
    for start, count in ((0, length), (length, 1)):
        if start + count > max_model_len:
            continue
        logits = backend.forward(
            ForwardBatch(
                token_ids=np.zeros(count, dtype=np.int32),
                positions=np.arange(start, start + count, dtype=np.int32),
                row_starts=np.array([0, count], dtype=np.int32),
                context_lens=np.array([start + count], dtype=np.int32),
                block_tables=table[:, : -(-(start + count) // block_size)],
                logit_tokens=np.array([count - 1], dtype=np.int32),
            )
        )
        if torch.isnan(logits).any():
            raise StartupError("the model's output is not a number: its weights are broken, or the type is too narrow")

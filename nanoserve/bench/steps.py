"""Times of single steps of the CPU engine, beside a probe of memory bandwidth: `python -m nanoserve.bench.steps`.

The machine under a server changes from minute to minute, so every line carries the bandwidth of its own moment, and
with several --quantization values the rounds are interleaved. Medians with the range over the runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from nanoserve import bench
from nanoserve.bench.variants import HELP, QUANTIZATIONS, variant
from nanoserve.config import ServerConfig
from nanoserve.hub.cache import cache_root
from nanoserve.hub.model_files import ModelFiles, read_model_files
from nanoserve.hub.resolve import prepare
from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.kv_cache import choose_kv_dtype
from nanoserve.runner.loader import load_weights
from nanoserve.runner.models import read_model_spec
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.native.backend import NativeBackend, NativeOptions
from nanoserve.runner.native.memory import allocate
from nanoserve.runner.native.open import open_native
from nanoserve.runner.native.packed_file import fingerprint

_PROBE_BYTES = 256 << 20
_BLOCK = 16


def decode_batch(rng: np.random.Generator, vocab: int, rows: int, context: int) -> ForwardBatch:
    """One token for each of `rows` requests of that context, in scattered blocks."""
    blocks = -(-context // _BLOCK)
    return ForwardBatch(
        token_ids=rng.integers(0, vocab, rows).astype(np.int32),
        positions=np.full(rows, context - 1, np.int32),
        row_starts=np.arange(rows + 1, dtype=np.int32),
        context_lens=np.full(rows, context, np.int32),
        block_tables=rng.permutation(rows * blocks).astype(np.int32).reshape(rows, blocks),
        logit_tokens=np.arange(rows, dtype=np.int32),
    )


def prefill_batch(rng: np.random.Generator, vocab: int, tokens: int) -> ForwardBatch:
    """One prompt from its beginning; logits of its last token."""
    return ForwardBatch(
        token_ids=rng.integers(0, vocab, tokens).astype(np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        row_starts=np.array([0, tokens], np.int32),
        context_lens=np.array([tokens], np.int32),
        block_tables=rng.permutation(-(-tokens // _BLOCK)).astype(np.int32)[None],
        logit_tokens=np.array([tokens - 1], np.int32),
    )


def _open(config: ServerConfig, files: ModelFiles, spec: ModelSpec, name: str, threads: int) -> NativeBackend:
    quantization, _, kv_dtype = name.partition(":")
    options = NativeOptions(
        threads=threads,
        quantization=quantization,
        kv_dtype=choose_kv_dtype(kv_dtype or "auto", torch.bfloat16),
        cache_dir=cache_root(config.model) / "native",
        fingerprint=fingerprint(files.weight_files),
    )

    def read(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return load_weights(files.weight_files, spec, dtype, lambda part: None)

    return open_native(files, spec, options, read, lambda stage, part: None)


def _times(run: Callable[[], object], seconds: float, clock: Callable[[], float]) -> list[float]:
    run()
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = clock()
        run()
        times.append((clock() - start) * 1e3)
    return times


def _shape(text: str) -> str:
    """An argparse type."""
    rows, _, context = text.partition("x")
    try:
        bench.positive(rows), bench.positive(context)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCONTEXT, such as 8x256") from None
    return text


def main() -> None:
    parser = bench.parser("steps", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    names = f"{', '.join(QUANTIZATIONS)}; {HELP}"
    parser.add_argument("--quantization", nargs="+", type=variant(), default=["auto"], metavar="NAME", help=names)
    parser.add_argument("--threads", type=int, default=0)
    usual = ["1x256", "8x256", "32x256", "64x256"]
    parser.add_argument("--decode", nargs="*", type=_shape, default=usual, metavar="ROWSxCONTEXT")
    parser.add_argument("--prefill", nargs="*", type=bench.positive, default=[512], metavar="TOKENS")
    parser.add_argument("--rounds", type=bench.positive, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument(
        "--cpu-time", action="store_true", help="the calling thread's CPU time (with --threads 1, on a busy machine)"
    )
    args = parser.parse_args()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    shapes = [(int(rows), int(context)) for rows, context in (item.split("x") for item in args.decode)]
    config = ServerConfig()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=args.model))
    files = read_model_files(prepare(config, lambda stage, part: None))
    spec = read_model_spec(files.config)
    longest = max([context for _, context in shapes] + args.prefill, default=0)
    if not 0 < longest <= spec.max_position:
        parser.error(f"contexts are 1 to {spec.max_position} tokens of this model, not {longest}")
    backends = {name: _open(config, files, spec, name, args.threads) for name in args.quantization}
    vocab = next(iter(backends.values())).vocab_size
    rng = np.random.default_rng(0)
    cases = {f"decode {r} x {c}": (r, decode_batch(rng, vocab, r, c)) for r, c in shapes}
    cases |= {f"prefill {count}": (count, prefill_batch(rng, vocab, count)) for count in args.prefill}
    probe = allocate(_PROBE_BYTES)
    probe[:] = 1
    threads = args.threads or len(os.sched_getaffinity(0))
    for backend in backends.values():
        backend.allocate_kv(max(int(batch.block_tables.max()) for _, batch in cases.values()) + 1)
        backend.touch_kv()
    for case, (tokens, batch) in cases.items():
        for _ in range(args.rounds):
            for name, backend in backends.items():
                speed = backend.read_bandwidth(probe, threads)
                times = _times(functools.partial(backend.forward, batch), args.seconds, clock)
                median = statistics.median(times)
                sys.stdout.write(
                    f"{case:16s} {name:9s} {median:8.2f} ms ({min(times):.2f}..{max(times):.2f}, n={len(times)}) "
                    f"{tokens / median * 1e3:7.0f} tok/s   memory {speed:.0f} GB/s\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()

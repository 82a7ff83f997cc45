"""`nanoserve bench detok`: what text costs, in CPU microseconds per token, beside the detokenizers of others.

Both decoders at batch 1, 64 and 256; the whole detokenizer (messages in, messages out, stop strings on a tenth of the
streams) at batch 256; `tokenizers`' DecodeStream; vLLM's two where an interpreter that has vLLM is given. All see the
same text, one token per stream and step, in interleaved rounds; a figure is the median of the rounds. CPU time of the
whole process is counted, not the clock, so that a busy machine and the threads of a batch decode are both seen right.
Making the decoder and the proof of its table are start-up and not counted; what it remembers, it learns in the run.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tokenizers.decoders import DecodeStream

from nanoserve import bench
from nanoserve.bench.detok_frames import STEPS, frames, streams_of, text
from nanoserve.bench.detok_process import measure_process
from nanoserve.bench.stats import percentile, spread
from nanoserve.config import DetokConfig, ModelConfig, ServerConfig
from nanoserve.detok.byte_decoder import ByteDecoder
from nanoserve.detok.incremental import Decoder, WindowDecoder
from nanoserve.detok.manager import DetokManager
from nanoserve.detok.token_table import TokenTable, build_table
from nanoserve.hub.resolve import prepare
from nanoserve.ipc.messages import TokenBatch
from nanoserve.tokenizer import HFTokenizer, load_tokenizer

PROMPT = 128
BATCHES = (1, 64, 256)
ROUNDS = 7

Run = Callable[[], int]
"""One timed run; returns CPU nanoseconds."""
Steps = list[list[list[int]]]
"""The new ids of each step and stream."""


def _steps(streams: list[list[int]]) -> Steps:
    return [[[ids[step]] for ids in streams] for step in range(STEPS)]


def _decoding(make: Callable[[], Decoder], streams_ids: list[list[int]]) -> Run:
    """The decoder is made anew each time: it has seen no text before."""
    steps = _steps(streams_ids)

    def run() -> int:
        decoder = make()
        started = time.process_time_ns()
        streams = [decoder.open(ids[-5:], skip_special=True) for ids in streams_ids]
        for step in steps:
            decoder.decode([(stream, ids, False) for stream, ids in zip(streams, step, strict=True)])
        return time.process_time_ns() - started

    return run


def _decode_stream(tokenizer: HFTokenizer, streams_ids: list[list[int]]) -> Run:
    backend = tokenizer.backend

    def run() -> int:
        started = time.process_time_ns()
        streams = [DecodeStream(skip_special_tokens=True) for _ in streams_ids]
        for step in range(STEPS):
            for stream, ids in zip(streams, streams_ids, strict=True):
                stream.step(backend, ids[step])
        return time.process_time_ns() - started

    return run


def _smallest_windows(tokenizer: HFTokenizer, streams_ids: list[list[int]]) -> Run:
    """What the library's batch decode of two ids a row costs alone: no window decoder that asks it can be cheaper."""
    batches = [[ids[step : step + 2] for ids in streams_ids] for step in range(STEPS - 1)]

    def run() -> int:
        started = time.process_time_ns()
        for rows in batches:
            tokenizer.decode_batch(rows, skip_special_tokens=False)
        return time.process_time_ns() - started

    return run


def _whole(tokenizer: HFTokenizer, table: TokenTable | None, kind: str, streams_ids: list[list[int]]) -> Run:
    """Frames of the engine to frames for api, stop strings on a tenth of the streams."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(TokenBatch)
    incoming = frames(streams_ids)

    def run() -> int:
        manager = DetokManager(tokenizer, DetokConfig(detokenizer=kind), table=table)
        started = time.process_time_ns()
        for frame in incoming:
            for batch in manager.process([decoder.decode(frame)]).text_batches.values():
                encoder.encode(batch)
        return time.process_time_ns() - started

    return run


def measure(tokenizer: HFTokenizer, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """CPU microseconds per token of each thing, one figure per round."""
    streams_ids = streams_of(tokenizer.encode(text(), add_special_tokens=False), max(BATCHES), STEPS)
    table = build_table(tokenizer)
    windows = WindowDecoder(tokenizer)
    things: dict[str, tuple[Run, int]] = {}
    for batch in BATCHES:
        some = streams_ids[:batch]
        if table is not None:
            things[f"bytes_us_{batch}"] = _decoding(lambda: ByteDecoder(table, windows), some), batch
        things[f"window_us_{batch}"] = _decoding(lambda: WindowDecoder(tokenizer), some), batch
    if table is not None:
        things["whole_bytes_us_256"] = _whole(tokenizer, table, "bytes", streams_ids), len(streams_ids)
    things["whole_window_us_256"] = _whole(tokenizer, table, "window", streams_ids), len(streams_ids)
    things["two_id_batch_decode_us"] = _smallest_windows(tokenizer, streams_ids), len(streams_ids)
    things["decode_stream_us"] = _decode_stream(tokenizer, streams_ids), len(streams_ids)
    seen: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, (run, batch) in things.items():
            gc.collect()
            took_us = run() / 1e3 / (batch * STEPS)
            if turn:  # the first turn warms up
                seen.setdefault(name, []).append(took_us)
    return seen


def measure_vllm(python: str, tokenizer_file: Path) -> dict[str, list[float]]:
    """The same streams through vLLM's detokenizers, in an interpreter that has vLLM."""
    script = Path(__file__).with_name("detok_vllm.py")
    asked = {"tokenizer": str(tokenizer_file), "text": text(), "streams": max(BATCHES), "steps": STEPS}
    request = json.dumps({**asked, "prompt": PROMPT, "rounds": ROUNDS})
    done = subprocess.run([python, str(script)], input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} {script.name} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _summary(seen: dict[str, list[float]]) -> dict[str, float]:
    medians = {name: round(percentile(values, 0.5), 4) for name, values in seen.items()}
    for kind in ("bytes", "window"):
        if f"whole_{kind}_us_256" in medians:
            medians[f"{kind}_tokens_per_cpu_second"] = round(1e6 / medians[f"whole_{kind}_us_256"])
        if "vllm_fast_us" in medians and f"{kind}_us_256" in medians:
            medians[f"vllm_fast_over_{kind}"] = round(medians["vllm_fast_us"] / medians[f"{kind}_us_256"], 2)
    return medians


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("detok", __doc__)
    parser.add_argument("--tokenizer", default="smollm2-135m", help="as --tokenizer of the server")
    parser.add_argument("--json", metavar="FILE", help="write the medians there; - is the terminal, and nothing else")
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that can import vllm")
    options = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as in the detokenizer process
    config = ServerConfig(model=ModelConfig(model="sim", tokenizer=options.tokenizer))
    directory = prepare(config, lambda *_, **__: None)
    tokenizer = load_tokenizer(directory)
    if not isinstance(tokenizer, HFTokenizer):
        raise SystemExit("the comparison needs a tokenizer.json")
    seen = measure(tokenizer)
    if options.vllm_python:
        seen |= measure_vllm(options.vllm_python, directory / "tokenizer.json")
    streams_ids = streams_of(tokenizer.encode(text(), add_special_tokens=False), max(BATCHES), STEPS)
    summary = _summary(seen) | measure_process(config, directory, streams_ids)
    if options.json != "-":
        print("| what | CPU us per token |\n|---|---|")
        for name, values in seen.items():
            print(f"| {name.replace('_us', '')} | {spread(values, 3)} |")
        for name in summary.keys() - seen.keys():
            print(f"{name}: {summary[name]}")
    if options.json:
        written = json.dumps({"tokenizer": options.tokenizer, **summary}, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(written)
        else:
            Path(options.json).write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())

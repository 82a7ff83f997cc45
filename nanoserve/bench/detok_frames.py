"""The text and the messages that the detokenizer's benchmarks run on."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
from pathlib import Path

import msgspec

from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import EngineStats, Opened, TextSpec, TokenBatch

LINES = (
    "The detokenizer turns ids into text while the next step runs; nobody waits for it, and it waits for nobody.",
    "Für 1.234,56 € kaufte die naïve Ärztin ein Buch: 日本語の本, 한국어 책, und lachte 😀👍🏽.",
    "Привет, мир! It's 2026 already.",
)
STEPS = 128
STOPS = ("\n\nHuman:", "</answer>")


def text() -> str:
    """Some 300 kB that do not repeat themselves: Python's own sources, with other scripts in between."""
    sources = [
        Path(inspect.getsourcefile(module) or "").read_text() for module in (argparse, inspect, subprocess, json)
    ]
    paragraphs = "\n".join(sources).split("\n\n")
    return "".join(f"{part}\n{LINES[place % 3]} {place}\n" for place, part in enumerate(paragraphs))


def streams_of(ids: list[int], num_streams: int, length: int) -> list[list[int]]:
    """Streams of so many ids, each another part of the text as far as it goes."""
    doubled = ids * (num_streams * length // len(ids) + 2)
    return [doubled[place * length : (place + 1) * length] for place in range(num_streams)]


def frames(streams_ids: list[list[int]], *, first_request: int = 1 << 40) -> list[bytes]:
    """What an engine sends for these streams, as messages: the first opens them, then one per step. All carry stats."""
    encoder = msgspec.msgpack.Encoder()
    request_ids = [first_request + place for place in range(len(streams_ids))]
    specs = [encoder.encode(TextSpec(stop=STOPS if place % 10 == 0 else ())) for place in range(len(streams_ids))]
    opened = [Opened(request_id, spec) for request_id, spec in zip(request_ids, specs, strict=True)]
    made = [encoder.encode(TokenBatch(0, 1, 0, opened=opened, stats=EngineStats()))]
    for step in range(STEPS):
        batch = TokenBatch(
            0,
            1,
            step + 1,
            request_ids=request_ids,
            first_index=[step] * len(request_ids),
            num_tokens=[1] * len(request_ids),
            token_ids=pack_ids(ids[step] for ids in streams_ids),
            stats=EngineStats(steps=step),
        )
        made.append(encoder.encode(batch))
    return made

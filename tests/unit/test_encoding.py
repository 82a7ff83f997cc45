"""Encoding off the loop: idle starts at once, what waits goes together, long texts have their own lane."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from nanoserve.api.encoding import Encoder
from nanoserve.api.errors import Unavailable
from nanoserve.errors import RequestError


class SlowTokenizer:
    """One id per character; every call waits for its gate and is written down."""

    vocab_size = 256
    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.calls: list[list[str]] = []
        self.threads: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        self.calls.append(list(texts))
        self.threads.add(threading.current_thread().name)
        if not self.gate.wait(5):
            raise AssertionError("the gate stayed shut")
        if "bad" in texts:
            raise ValueError("no")
        return [[1] * add_special_tokens + [ord(char) for char in text] for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row) for row in rows]

    def id_to_token(self, token_id: int) -> str | None:
        return chr(token_id)

    def token_to_id(self, token: str) -> int | None:
        return ord(token)


async def until(condition: object) -> None:
    for _ in range(500):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not in time")


async def test_what_waits_goes_together_in_the_next_call() -> None:
    tokenizer = SlowTokenizer()
    encoder = Encoder(tokenizer)
    first = asyncio.create_task(encoder.encode(["a"], add_special_tokens=True))
    await until(lambda: tokenizer.calls)  # an idle encoder has begun already
    rest = [asyncio.create_task(encoder.encode([c, c * 2], add_special_tokens=c != "d")) for c in "bcd"]
    await asyncio.sleep(0.02)
    tokenizer.gate.set()
    assert await first == [[1, 97]]
    assert await asyncio.gather(*rest) == [[[1, 98], [1, 98, 98]], [[1, 99], [1, 99, 99]], [[100], [100, 100]]]
    assert tokenizer.calls == [["a"], ["b", "bb", "c", "cc"], ["d", "dd"]]  # one call per flag
    encoder.close()


@pytest.mark.rule(22)
async def test_a_long_text_does_not_hold_up_short_ones() -> None:
    tokenizer = SlowTokenizer()
    encoder = Encoder(tokenizer)
    long = asyncio.create_task(encoder.encode(["x" * 100_000], add_special_tokens=False))
    await until(lambda: tokenizer.calls)
    short = asyncio.create_task(encoder.encode(["a"], add_special_tokens=False))
    await until(lambda: len(tokenizer.calls) == 2)  # it runs beside the long one
    tokenizer.gate.set()
    assert await short == [[97]] and len((await long)[0]) == 100_000
    assert len(tokenizer.threads) == 2 and "MainThread" not in tokenizer.threads
    encoder.close()


async def test_an_error_and_a_cancelled_waiter_harm_nobody_else() -> None:
    tokenizer = SlowTokenizer()
    tokenizer.gate.set()
    encoder = Encoder(tokenizer)
    with pytest.raises(ValueError, match="no"):
        await encoder.encode(["bad"], add_special_tokens=False)
    tokenizer.gate.clear()
    first = asyncio.create_task(encoder.encode(["a"], add_special_tokens=False))
    await until(lambda: ["a"] in tokenizer.calls)
    gone = asyncio.create_task(encoder.encode(["b"], add_special_tokens=False))
    last = asyncio.create_task(encoder.encode(["c"], add_special_tokens=False))
    await asyncio.sleep(0.02)
    gone.cancel()
    tokenizer.gate.set()
    assert await first == [[97]] and await last == [[99]]
    assert ["c"] in tokenizer.calls  # nobody waited for b any more
    encoder.close()


@pytest.mark.rule(18)
async def test_rendering_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.api.encoding._RENDER_SECONDS", 0.05)
    encoder = Encoder(SlowTokenizer())
    release = threading.Event()
    with pytest.raises(RequestError, match="too long"):
        await encoder.run(lambda: release.wait(5))
    release.set()
    assert await encoder.run(lambda: 7) == 7
    encoder.close()


@pytest.mark.rule(18)
async def test_what_never_began_is_told_to_come_back_and_what_runs_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nanoserve.api.encoding._RENDER_SECONDS", 0.2)
    encoder = Encoder(SlowTokenizer())
    gate = threading.Event()
    running = [asyncio.create_task(encoder.run(lambda: gate.wait(5))) for _ in range(4)]
    await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await encoder.run(lambda: True)
    for task in running:
        with pytest.raises(RequestError) as refused:
            await task
        assert refused.value.status == 400
    gate.set()
    encoder.close()

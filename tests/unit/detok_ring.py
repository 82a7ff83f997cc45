"""A scripted engine and a strict api around a real DetokManager, for tests of what crosses their edges."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from nanoserve.config import DetokConfig
from nanoserve.detok.manager import DetokManager
from nanoserve.detok.token_table import _BYTE_OF_CHAR, TokenTable, build_table
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.messages import (
    AbortCause,
    AbortRequest,
    Finished,
    FinishReason,
    Opened,
    Resync,
    RowLogprobs,
    TextBatch,
    TextFinished,
    TextSpec,
    TokenBatch,
    TokenText,
)
from nanoserve.tokenizer import Tokenizer
from tests.unit.detok_tokenizers import byte_level

TOKENIZER = byte_level()

_tables: dict[int, TokenTable | None] = {}
_encode_spec = msgspec.msgpack.Encoder().encode


@dataclass
class Script:
    """What the engine will say of one request."""

    request_id: int
    token_ids: list[int]
    spec: bytes
    stop_token_id: int | None = None
    reason: FinishReason = FinishReason.LENGTH
    scores: list[RowLogprobs] | None = None  # one of a single token per id
    sent: int = 0
    opened: bool = False
    finished: Finished | None = None
    released: bool = False


class FakeEngine:
    """Sends each live request some ids a step; keeps ids until they are released; answers Resync as the real one."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.scripts: dict[int, Script] = {}
        self.aborts: list[AbortRequest] = []
        self.num_resyncs = 0
        self._step = 0
        self._answers: list[Script] = []

    def add(self, request_id: int, token_ids: list[int], spec: TextSpec, **more: object) -> Script:
        script = Script(request_id, token_ids, _encode_spec(spec), **more)  # type: ignore[arg-type]
        self.scripts[request_id] = script
        return script

    @property
    def is_done(self) -> bool:
        return not self._answers and all(s.finished is not None for s in self.scripts.values())

    def step(self, sizes: dict[int, int] | int = 1) -> TokenBatch:
        """One batch: `sizes` ids per live request, `Opened` first and `Finished` last."""
        self._step += 1
        opened: list[Opened] = []
        finished: list[Finished] = []
        rows: list[tuple[int, int, list[int]]] = []
        logprobs: list[RowLogprobs] = []
        answered = {script.request_id for script in self._answers}
        for script in self._answers:
            opened.append(Opened(script.request_id, script.spec, pack_ids(script.token_ids[: script.sent])))
            if script.finished is not None:
                finished.append(script.finished)
        self._answers = []
        for script in self.scripts.values():
            if script.finished is not None:
                continue
            if not script.opened:
                script.opened = True
                opened.append(Opened(script.request_id, script.spec))
            elif script.request_id in answered:
                continue
            size = sizes if isinstance(sizes, int) else sizes.get(script.request_id, 1)
            ids = script.token_ids[script.sent : script.sent + size]
            if ids:
                if script.scores is not None:
                    logprobs.append(_merged(len(rows), script.scores[script.sent : script.sent + len(ids)]))
                rows.append((script.request_id, script.sent, ids))
                script.sent += len(ids)
            if script.sent == len(script.token_ids):
                script.finished = self._end(script)
                finished.append(script.finished)
        return TokenBatch(
            0,
            self.incarnation,
            self._step,
            request_ids=[row[0] for row in rows],
            first_index=[row[1] for row in rows],
            num_tokens=[len(row[2]) for row in rows],
            token_ids=pack_ids(token_id for row in rows for token_id in row[2]),
            opened=opened,
            logprobs=logprobs,
            finished=finished,
        )

    def receive(self, messages: list[AbortRequest | Resync]) -> list[Finished]:
        """Terminal records of aborted requests are returned: the caller decides when the detokenizer gets them."""
        ended: list[Finished] = []
        for message in messages:
            if isinstance(message, Resync):
                ids = message.request_ids or list(self.scripts)
                self.num_resyncs += len(ids)
                self._answers += [
                    self.scripts[i] for i in ids if not self.scripts[i].released and self.scripts[i].opened
                ]
                continue
            self.aborts.append(message)
            for at, request_id in enumerate(message.request_ids):
                script = self.scripts[request_id]
                if script.finished is None:
                    stop = message.cause is AbortCause.STOP_STRING
                    script.finished = Finished(
                        request_id,
                        FinishReason.STOP if stop else FinishReason.ABORT,
                        num_output_tokens=message.num_kept[at] if stop else script.sent,
                    )
                    ended.append(script.finished)
        return ended

    def _end(self, script: Script) -> Finished:
        reason = FinishReason.STOP if script.stop_token_id is not None else script.reason
        return Finished(
            script.request_id,
            reason,
            num_prompt_tokens=3,
            num_output_tokens=len(script.token_ids),
            stop_token_id=script.stop_token_id,
            is_eos=script.stop_token_id is not None,
        )


def _merged(row: int, scores: list[RowLogprobs]) -> RowLogprobs:
    return RowLogprobs(
        row,
        [s.logprobs[0] for s in scores],
        [s.ranks[0] for s in scores],
        [s.top_ids[0] for s in scores],
        [s.top_logprobs[0] for s in scores],
    )


@dataclass
class Received:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    entries: list[TokenText] = field(default_factory=list)
    entry_chars: list[int] = field(default_factory=list)  # len(text) when each entry came
    finished: TextFinished | None = None
    num_finished: int = 0


class StrictApi:
    """Drops what it has by absolute position; a gap or a contradiction is an error of the test."""

    def __init__(self) -> None:
        self.received: dict[int, Received] = {}

    def take(self, batch: TextBatch) -> None:
        ids = unpack_ids(batch.token_ids)
        begin = 0
        entries = {row.row: row for row in batch.logprobs}
        for row, request_id in enumerate(batch.request_ids):
            end = begin + batch.num_tokens[row]
            self._row(batch, row, ids[begin:end])
            begin = end
            got = self.received[request_id]
            if row in entries:
                have = len(got.entries) - entries[row].first_index
                assert have >= 0, "a gap in the entries"
                got.entries += entries[row].tokens[have:]
                got.entry_chars += [len(got.text)] * len(entries[row].tokens[have:])
        for record in batch.finished:
            got = self.received.setdefault(record.finished.request_id, Received())
            got.num_finished += 1
            if got.finished is None:
                got.finished = record

    def _row(self, batch: TextBatch, row: int, ids: list[int]) -> None:
        got = self.received.setdefault(batch.request_ids[row], Received())
        delta, offset, first = batch.deltas[row], batch.char_offset[row], batch.first_index[row]
        assert ids or delta or batch.logprobs, "an empty row"
        assert offset <= len(got.text) and first <= len(got.ids), "a gap"
        assert got.text[offset : offset + len(delta)] == delta[: len(got.text) - offset], "other text than before"
        new = delta[len(got.text) - offset :]
        if got.finished is None:
            got.text += new
            got.deltas.append(new)
            got.ids += ids[len(got.ids) - first :]


class Ring:
    """Engine, detokenizer and api, joined without sockets."""

    def __init__(self, tokenizer: Tokenizer | None, *, max_states: int = 65536, detokenizer: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._config = DetokConfig(detok_max_states=max_states, detokenizer=detokenizer)
        if tokenizer is not None and id(tokenizer) not in _tables:
            _tables[id(tokenizer)] = build_table(tokenizer)
        self._table = _tables[id(tokenizer)] if tokenizer is not None else None
        self.engine = FakeEngine()
        self.api = StrictApi()
        self.detok = DetokManager(tokenizer, self._config, table=self._table)
        self._waiting: list[TokenBatch] = []
        self._ended: list[Finished] = []

    def step(self, sizes: dict[int, int] | int = 1, *, drain: bool = True) -> None:
        """One engine step; `drain` False leaves the batch waiting."""
        if self._ended:
            self._waiting.append(TokenBatch(0, self.engine.incarnation, 0, finished=self._ended))
            self._ended = []
        self._waiting.append(self.engine.step(sizes))
        if drain:
            self.drain()

    def drain(self) -> None:
        batches, self._waiting = self._waiting, []
        output = self.detok.process(batches)
        for batch in output.text_batches.values():
            self.api.take(batch)
        self._ended += self.engine.receive(output.to_engine)

    def restart_detok(self) -> None:
        """SIGKILL: states and waiting messages of the old one are gone."""
        self._waiting = []
        self.detok = DetokManager(self._tokenizer, self._config, incarnation=2, table=self._table)
        self.engine.receive([self.detok.resync_all()])

    def run(self, sizes: dict[int, int] | int = 1, *, max_steps: int = 10_000) -> None:
        """Until every request has its terminal record everywhere."""
        for _ in range(max_steps):
            if self.engine.is_done and not self._ended and not self._waiting:
                break
            self.step(sizes)
        else:
            raise AssertionError("the ring did not come to rest")

    def of(self, request_id: int) -> Received:
        return self.api.received[request_id]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def byte_ids(raw: bytes) -> list[int]:
    """One token per byte."""
    spelled = {value: char for char, value in _BYTE_OF_CHAR.items()}
    return [TOKENIZER.token_to_id(spelled[value]) or 0 for value in raw]


def run_one(token_ids: list[int], spec: TextSpec, sizes: list[int] | int = 1, **more: object) -> Ring:
    """One request through a fresh ring, its ids in chunks of these sizes."""
    ring = Ring(TOKENIZER)
    ring.engine.add(1, token_ids, spec, **more)
    for size in sizes if isinstance(sizes, list) else []:
        ring.step(size)
    ring.run(sizes if isinstance(sizes, int) else 1)
    return ring


def word(text: str) -> list[int]:
    """The pieces of `text` as single-character tokens, so that a stop string is never one token."""
    return byte_ids(text.encode())

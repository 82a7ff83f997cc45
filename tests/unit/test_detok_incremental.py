"""Incremental text is one decode of all ids: every tokenizer family, any ids, any chunking, both decoders."""

from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from nanoserve.detok.byte_decoder import ByteDecoder
from nanoserve.detok.incremental import Decoder, WindowDecoder, take_utf8
from nanoserve.detok.token_table import build_table
from nanoserve.tokenizer import HFTokenizer
from tests.unit.detok_tokenizers import CORPUS, FAMILIES, POISON, Breaking, byte_level, gemma_like, llama2, reference

_decoders: dict[tuple[str, str], Decoder] = {}


def decoder_of(family: str, kind: str) -> Decoder:
    if (family, kind) not in _decoders:
        tokenizer = FAMILIES[family]()
        windows = WindowDecoder(tokenizer)
        _decoders[family, "window"] = windows
        table = build_table(tokenizer)
        assert table is not None
        _decoders[family, "bytes"] = ByteDecoder(table, windows)
    return _decoders[family, kind]


def stream_text(
    decoder: Decoder, token_ids: list[int], sizes: list[int], tail: list[int], *, skip: bool, per_token: bool
) -> list[str]:
    """All deltas of one stream whose ids come in chunks of these sizes, the flush last."""
    stream = decoder.open(tail, skip_special=skip)
    deltas: list[str] = []
    at = 0
    for size in sizes:
        chunk = token_ids[at : at + size]
        pieces = decoder.decode([(stream, chunk, per_token)])[0]
        assert pieces is not None
        assert len(pieces) == (len(chunk) if per_token else 1)
        deltas.append("".join(pieces))
        at += size
    deltas.append(decoder.flush(stream))
    return deltas


def naive_text(tokenizer: HFTokenizer, token_ids: list[int]) -> str:
    return "".join(tokenizer.decode([token_id]) for token_id in token_ids)


def chunk_sizes(data: st.DataObject, total: int) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(data.draw(st.integers(1, min(20, total - sum(sizes)))))
    return sizes


def draw_ids(data: st.DataObject, tokenizer: HFTokenizer) -> list[int]:
    """Random ids, or the ids of random text, or of text with random ids in between."""
    some_id = st.integers(0, tokenizer.vocab_size - 1)
    kind = data.draw(st.sampled_from(["ids", "text", "both"]))
    ids = data.draw(st.lists(some_id, max_size=40)) if kind != "text" else []
    if kind != "ids":
        text = data.draw(st.one_of(st.sampled_from(CORPUS), st.text(max_size=40)))
        at = data.draw(st.integers(0, len(ids)))
        ids[at:at] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.rule(43, 46)
@pytest.mark.parametrize("kind", ["window", "bytes"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_joined_are_one_decode(family: str, kind: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    decoder = decoder_of(family, kind)
    token_ids = draw_ids(data, tokenizer)
    some_id = st.integers(0, tokenizer.vocab_size - 1)
    tail = data.draw(st.one_of(st.just([]), st.lists(some_id, min_size=1, max_size=5)))
    skip = data.draw(st.booleans())
    sizes = chunk_sizes(data, len(token_ids))
    deltas = stream_text(decoder, token_ids, sizes, tail, skip=skip, per_token=data.draw(st.booleans()))
    assert "".join(deltas) == reference(tokenizer, token_ids, tail, skip=skip)


@pytest.mark.rule(43)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_valid_text_is_what_the_library_decodes(family: str, data: st.DataObject) -> None:
    """The same against `tokenizers` itself, without our reading of byte runs."""
    tokenizer = FAMILIES[family]()
    token_ids = tokenizer.encode(data.draw(st.text(max_size=60)), add_special_tokens=False)
    for kind in ("window", "bytes"):
        deltas = stream_text(decoder_of(family, kind), token_ids, [1] * len(token_ids), [], skip=True, per_token=False)
        assert "".join(deltas) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("family", ["byte_level", "llama2", "gemma_like"])
def test_a_naive_decode_fails_where_ours_does_not(family: str) -> None:
    tokenizer = FAMILIES[family]()
    rng = random.Random(7)
    naive_wrong = ours_wrong = 0
    for _ in range(100):
        text = "".join(rng.choice(["day ", "é", "日本", "👍🏽", "မြန်မာ", "ภาษา", "🌶️"]) for _ in range(12))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(token_ids)
        naive_wrong += naive_text(tokenizer, token_ids) != whole
        for kind in ("window", "bytes"):
            deltas = stream_text(decoder_of(family, kind), token_ids, [1] * 400, [], skip=True, per_token=False)
            ours_wrong += "".join(deltas) != whole
    assert naive_wrong > 90
    assert ours_wrong == 0


@pytest.mark.rule(44)
@pytest.mark.parametrize("kind", ["window", "bytes"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_valid_characters_come_at_most_three_tokens_late(family: str, kind: str, data: st.DataObject) -> None:
    """With bytes as tokens no character waits longer than its own bytes do; no delta shows a U+FFFD."""
    tokenizer = FAMILIES[family]()
    token_ids = tokenizer.encode(data.draw(st.sampled_from(CORPUS)), add_special_tokens=False)
    decoder = decoder_of(family, kind)
    stream = decoder.open([], skip_special=True)
    sent = 0
    totals: list[int] = []
    for token_id in token_ids:
        pieces = decoder.decode([(stream, [token_id], False)])[0]
        assert pieces is not None and "\ufffd" not in pieces[0]
        sent += len(pieces[0])
        totals.append(sent)
    for at in range(len(token_ids)):
        whole = tokenizer.decode(token_ids[: at + 1])
        certain = len(whole.rstrip("\ufffd"))
        assert totals[at] >= certain or totals[min(at + 3, len(totals) - 1)] >= len(whole)


class Counting:
    """Counts the ids that a tokenizer is made to decode."""

    def __init__(self, inner: HFTokenizer) -> None:
        self._inner = inner
        self.decoded_ids = 0
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def decode_batch(self, rows: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        self.decoded_ids += sum(map(len, rows))
        self.calls += 1
        return self._inner.decode_batch(rows, skip_special_tokens=skip_special_tokens)


@pytest.mark.case(8)
@pytest.mark.rule(44)
@pytest.mark.parametrize("tokenizer", [byte_level(), llama2()], ids=["byte_level", "llama2"])
@pytest.mark.parametrize("byte", [0x94, 0xE2, 0xF0, 0xFF])
def test_garbage_costs_what_its_first_tokens_cost(tokenizer: HFTokenizer, byte: int) -> None:
    spelled = [name for name in (f"<0x{byte:02X}>",) if tokenizer.token_to_id(name) is not None]
    if spelled:
        junk = tokenizer.token_to_id(spelled[0])
    else:
        table = build_table(tokenizer)
        assert table is not None
        junk = next(i for i, raw in table.parts.items() if raw == bytes([byte]))
    assert junk is not None
    counting = Counting(tokenizer)
    decoder = WindowDecoder(counting)  # type: ignore[arg-type]
    stream = decoder.open([], skip_special=True)
    text = ""
    costs: list[int] = []
    for _ in range(2000):
        before = counting.decoded_ids
        pieces = decoder.decode([(stream, [junk], False)])[0]
        assert pieces is not None
        text += pieces[0]
        costs.append(counting.decoded_ids - before)
        assert len(stream.context) <= 12 and len(stream.pending) <= 3
    assert sum(costs[-100:]) <= sum(costs[20:120])
    assert len(text) >= 1999
    assert text + decoder.flush(stream) == "\ufffd" * 2000
    assert (decoder.num_cuts > 100) == (not spelled)  # byte tokens never enter a window


def test_a_drain_is_two_batch_decodes_whatever_its_size() -> None:
    counting = Counting(byte_level())
    decoder = WindowDecoder(counting)  # type: ignore[arg-type]
    streams = [decoder.open([1, 2, 3 + i], skip_special=i % 2 == 0) for i in range(64)]
    ids = byte_level().encode("The quick brown fox 🔥 jumps", add_special_tokens=False)
    for step, most in enumerate((2, 2, 1)):  # what the same contexts say is known the third time
        calls = counting.calls
        decoder.decode([(stream, ids[:3] if i % 2 else ids[3:4], False) for i, stream in enumerate(streams)])
        assert counting.calls - calls == most, step
    calls = counting.calls
    decoder.decode([(stream, [], False) for stream in streams])
    assert counting.calls == calls


@pytest.mark.rule(45)
def test_a_window_of_plain_text_is_one_token_of_context() -> None:
    counting = Counting(byte_level())
    decoder = WindowDecoder(counting)  # type: ignore[arg-type]
    stream = decoder.open([], skip_special=True)
    for token_id in byte_level().encode("The quick brown fox jumps over" * 20, add_special_tokens=False):
        before = counting.decoded_ids
        decoder.decode([(stream, [token_id], False)])
        assert counting.decoded_ids - before <= 3
        assert len(stream.context) == 1


@pytest.mark.rule(45)
def test_tokens_without_text_hold_nothing_up_and_do_not_widen_the_window() -> None:
    tokenizer = byte_level()
    special = min(tokenizer.special_ids)
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    counting = Counting(tokenizer)
    decoder = WindowDecoder(counting)  # type: ignore[arg-type]
    stream = decoder.open([], skip_special=True)
    for token_id, text in [(letter, "x"), *[(special, "")] * 200, (letter, "x")]:
        before = counting.decoded_ids
        assert decoder.decode([(stream, [token_id], False)]) == [[text]]
        assert counting.decoded_ids - before <= 3


@pytest.mark.rule(48)
def test_a_prompt_that_ends_inside_a_character_is_no_part_of_the_output() -> None:
    tokenizer = byte_level()
    table = build_table(tokenizer)
    assert table is not None
    of_byte = {raw[0]: i for i, raw in table.parts.items() if len(raw) == 1}
    day = tokenizer.encode("Good day", add_special_tokens=False)
    for kind in ("window", "bytes"):
        decoder = decoder_of("byte_level", kind)
        for cut in (1, 2, 3):
            tail = [*day, *(of_byte[byte] for byte in "🔥".encode()[:cut])]
            rest = [of_byte[byte] for byte in "🔥".encode()[cut:]]
            deltas = stream_text(decoder, rest, [1] * len(rest), tail[-5:], skip=True, per_token=False)
            assert "".join(deltas) == bytes("🔥".encode()[cut:]).decode("utf-8", "replace")


@pytest.mark.rule(46)
def test_a_byte_run_that_turns_invalid_later_keeps_what_was_right() -> None:
    """`tokenizers` alone would take back a euro sign that the client has already (ADR 0004)."""
    tokenizer = gemma_like()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in b"\xe2\x82\xac\xff"]
    assert tokenizer.decode(ids) == "\ufffd" * 4
    for kind in ("window", "bytes"):
        deltas = stream_text(decoder_of("gemma_like", kind), ids, [1, 1, 1, 1], [], skip=True, per_token=False)
        assert "".join(deltas) == "€\ufffd"


@pytest.mark.parametrize("raw", [b" A", b"  A", b"A ", b"\xc3\xa9 x"])
def test_a_text_may_begin_with_byte_tokens(raw: bytes) -> None:
    """Llama 2 drops one leading space, also where it is spelled as a byte."""
    tokenizer = llama2()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in raw]
    ids += tokenizer.encode("dog", add_special_tokens=False)
    for kind in ("window", "bytes"):
        for sizes in ([1] * len(ids), [len(ids)]):
            deltas = stream_text(decoder_of("llama2", kind), ids, sizes, [], skip=True, per_token=False)
            assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.rule(50)
def test_a_row_that_cannot_be_decoded_fails_alone() -> None:
    tokenizer = Breaking(byte_level())
    decoder = WindowDecoder(tokenizer)
    good, bad = decoder.open([POISON], skip_special=True), decoder.open([], skip_special=True)
    ids = byte_level().encode("fox", add_special_tokens=False)
    assert decoder.decode([(good, ids, False), (bad, [POISON], False)]) == [["fox"], None]
    assert build_table(tokenizer) is None


_lead = st.sampled_from(
    [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
)


@pytest.mark.rule(44, 49)
@given(st.one_of(st.binary(max_size=40), st.lists(_lead, max_size=40).map(bytes)), st.integers(1, 7))
def test_utf8_taken_in_pieces_is_utf8(raw: bytes, size: int) -> None:
    """And nothing is held that no further byte can change: what is pending is one unfinished character."""
    text, pending = "", b""
    for at in range(0, len(raw), size):
        piece, pending = take_utf8(pending, raw[at : at + size])
        text += piece
        assert len(pending) <= 3
        assert len(pending.decode("utf-8", "replace")) <= 1
    assert text + pending.decode("utf-8", "replace") == raw.decode("utf-8", "replace")


@pytest.mark.rule(49)
def test_half_a_surrogate_is_invalid_at_once() -> None:
    assert take_utf8(b"\xed", b"\xa9") == ("\ufffd\ufffd", b"")
    assert take_utf8(b"\xed", b"\x9f") == ("", b"\xed\x9f")


def test_few_byte_tokens_are_byte_tokens_too() -> None:
    """A vocabulary may have those alone that its text needs."""
    plain = json.loads(gemma_like().backend.to_str())
    for value in range(0x80):
        del plain["model"]["vocab"][f"<0x{value:02X}>"]
    tokenizer = copy.copy(gemma_like())
    tokenizer.backend = Backend.from_str(json.dumps(plain))
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in b"\xe2\x82\xac\xff"]
    decoder = WindowDecoder(tokenizer)
    assert "".join(stream_text(decoder, ids, [1] * 4, [], skip=True, per_token=False)) == "€\ufffd"


def test_what_is_remembered_of_contexts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.detok.incremental._MAX_MEMO", 50)
    tokenizer = byte_level()
    decoder = WindowDecoder(tokenizer)
    stream = decoder.open([], skip_special=True)
    rng = random.Random(3)
    for _ in range(1000):
        decoder.decode([(stream, [rng.randrange(tokenizer.vocab_size)], False)])
        assert len(decoder._pairs) <= 52 and len(decoder._memo) <= 52

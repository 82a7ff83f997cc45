"""Logprob entries: real bytes that join to the text, in the frame of their last byte, none lost."""

from __future__ import annotations

import random
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.config import DetokConfig
from nanoserve.detok.incremental import take_utf8
from nanoserve.detok.logprobs import escape
from nanoserve.detok.manager import DetokManager
from nanoserve.detok.token_table import _BYTE_OF_CHAR
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import EmitMode, Opened, PromptLogprobs, RowLogprobs, TextSpec, TokenBatch
from nanoserve.tokenizer import HFTokenizer
from tests.unit.detok_ring import Ring
from tests.unit.detok_tokenizers import CORPUS, FAMILIES, SPECIALS, byte_level, byte_level_stripped, llama2, word_piece


def scores_for(ids: list[int], vocab_size: int) -> list[RowLogprobs]:
    return [RowLogprobs(0, [-0.5 * i], [1], [[i, (i + 1) % vocab_size]], [[-0.1, -2.0]]) for i in ids]


def run(tokenizer: HFTokenizer, ids: list[int], spec: TextSpec, sizes: list[int], kind: str = "auto") -> Ring:
    ring = Ring(tokenizer, detokenizer=kind)
    ring.engine.add(1, ids, spec, scores=scores_for(ids, tokenizer.vocab_size))
    for size in sizes:
        ring.step(size)
    ring.run()
    return ring


@pytest.mark.rule(62, 63)
@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_joined_bytes_are_the_text_and_no_entry_is_lost(family: str, kind: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(data.draw(st.sampled_from(CORPUS)), add_special_tokens=False)
    ids[data.draw(st.integers(0, len(ids))) : 0] = [tokenizer.token_to_id(SPECIALS[2]) or 0]
    tail = tuple(data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5)))
    spec = TextSpec(prompt_tail=tail, emit=data.draw(st.sampled_from(list(EmitMode))))
    got = run(tokenizer, ids, spec, data.draw(st.lists(st.integers(0, 5), max_size=40)), kind).of(1)
    assert b"".join(entry.raw for entry in got.entries) == got.text.encode()
    assert [entry.token_id for entry in got.entries] == ids
    assert [entry.logprob for entry in got.entries] == [-0.5 * i for i in ids]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_entry_comes_with_its_last_byte_and_not_before(data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(data.draw(st.text(alphabet="a é🔥STOP", max_size=20)), add_special_tokens=False)
    ring = Ring(tokenizer)
    ring.engine.add(1, ids, TextSpec(stop=("STOPPED",)), scores=scores_for(ids, tokenizer.vocab_size))
    while not ring.engine.is_done:
        ring.step(data.draw(st.integers(1, 3)))
        if 1 not in ring.api.received or ring.of(1).finished is not None:
            continue
        got = ring.of(1)
        # Characters that are out or begun: every entry but the last lies inside the text that was sent.
        raw = b"".join(entry.raw for entry in got.entries)
        assert got.text.encode().startswith(raw)
    for entry, chars in zip(ring.of(1).entries, ring.of(1).entry_chars, strict=True):
        assert entry.text_offset <= chars
    assert len(ring.of(1).entries) == len(ids)


@pytest.mark.rule(62)
def test_parts_of_a_character_have_their_own_bytes_and_names_that_differ() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("🔥🔥", add_special_tokens=False)
    assert len(ids) > 2
    got = run(tokenizer, ids, TextSpec(), []).of(1)
    assert b"".join(entry.raw for entry in got.entries) == "🔥🔥".encode()
    assert got.entries[0].text.startswith("bytes:\\x") and escape(got.entries[0].raw) == got.entries[0].text
    assert len({entry.text for entry in got.entries}) == len(set(ids))
    assert got.entries[0].text_offset == 0
    assert all(len(entry.top) == 2 and entry.top[0][0] == entry.token_id for entry in got.entries)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_bytes_where_it_cuts_the_text(include: bool) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the quick brown fox jumps", add_special_tokens=False)
    for size in (1, 4, 50):
        spec = TextSpec(stop=("wn f",), include_stop_str_in_output=include)
        got = run(tokenizer, ids, spec, [size] * 40).of(1)
        assert got.text == ("the quick brown f" if include else "the quick bro")
        assert b"".join(entry.raw for entry in got.entries) == got.text.encode()
        assert got.finished is not None
        assert len(got.entries) == got.finished.finished.num_output_tokens == len(got.ids)


def spelled(raw: bytes) -> list[int]:
    """One token per byte of the byte-level vocabularies."""
    letters = {value: char for char, value in _BYTE_OF_CHAR.items()}
    return [byte_level().token_to_id(letters[byte]) or 0 for byte in raw]


def tokenizer_bytes(token_ids: list[int]) -> list[int]:
    """`spelled` undone."""
    return [_BYTE_OF_CHAR[byte_level().id_to_token(token_id) or ""] for token_id in token_ids]


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("begin", [b"\xe2", b"\xf0\x9f", b"\xff", b"\xaa\xc3"])
def test_a_cut_behind_invalid_bytes_keeps_whole_bytes(kind: str, begin: bytes) -> None:
    """The U+FFFD in the text is none of the token's bytes, so it must not be counted as three."""
    tokenizer = byte_level()
    name, token_id = max(
        (name, i) for name, i in tokenizer.backend.get_vocab().items() if re.fullmatch("[a-z]{3}", name)
    )
    for size in (1, 50):
        spec = TextSpec(stop=(name[1:],))
        got = run(tokenizer, [*spelled(begin), token_id, token_id], spec, [size] * 9, kind).of(1)
        assert got.text == begin.decode("utf-8", "replace") + name[0]
        assert b"".join(entry.raw for entry in got.entries) == begin + name[0].encode()


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("size", [1, 50])
def test_bytes_of_a_beginning_that_is_no_character(kind: str, size: int) -> None:
    """Only the dropped space is missing, and it is missing once."""
    tokenizer = byte_level_stripped()
    fire = tokenizer.encode(" 🔥 🔥", add_special_tokens=False)
    assert tokenizer.decode(fire[:1]) == "\ufffd" and len(tokenizer.id_to_token(fire[0]) or "") == 3
    got = run(tokenizer, fire, TextSpec(), [size] * 20, kind).of(1)
    assert b"".join(entry.raw for entry in got.entries) == got.text.encode() == "🔥 🔥".encode()
    junk = [*spelled(b"\xaa"), *fire]
    got = run(tokenizer, junk, TextSpec(), [size] * 20, kind).of(1)
    assert got.text == "\ufffd 🔥 🔥"
    assert b"".join(entry.raw for entry in got.entries) == b"\xaa" + " 🔥 🔥".encode()


def test_a_leading_space_belongs_to_its_token_except_at_the_very_beginning() -> None:
    tokenizer = llama2()
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    first = run(tokenizer, ids, TextSpec(), []).of(1)
    assert first.text == "the dog" and not first.entries[0].raw.startswith(b" ")
    later = run(tokenizer, ids, TextSpec(prompt_tail=tuple(ids)), []).of(1)
    assert later.text == " the dog" and later.entries[0].raw.startswith(b" ")


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("size", [1, 50])
def test_a_hidden_stop_id_has_an_entry_without_bytes(kind: str, size: int) -> None:
    tokenizer = byte_level()
    fox = tokenizer.encode("fox", add_special_tokens=False)
    for end in (tokenizer.token_to_id("</s>") or 0, fox[0]):
        ids = [*fox, end]
        ring = Ring(tokenizer, detokenizer=kind)
        ring.engine.add(1, ids, TextSpec(), scores=scores_for(ids, tokenizer.vocab_size), stop_token_id=end)
        ring.run(size)
        last = ring.of(1).entries[-1]
        assert (last.token_id, last.text, last.raw) == (end, tokenizer.decode([end], skip_special_tokens=False), b"")
        assert len(ring.of(1).entries) == len(ids)


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("size", [1, 50])
def test_a_hidden_stop_id_does_not_finish_a_character(kind: str, size: int) -> None:
    tokenizer = byte_level()
    ids = spelled("漢".encode())
    ring = Ring(tokenizer, detokenizer=kind)
    ring.engine.add(1, ids, TextSpec(), scores=scores_for(ids, tokenizer.vocab_size), stop_token_id=ids[-1])
    ring.run(size)
    assert ring.of(1).text == "\ufffd"
    assert [entry.raw for entry in ring.of(1).entries] == [b"\xe6", b"\xbc", b""]


def test_without_a_table_names_come_from_the_tokenizer() -> None:
    tokenizer = word_piece()
    ring = Ring(tokenizer)
    ring.detok = DetokManager(tokenizer, DetokConfig(), table=None)
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    ring.engine.add(1, ids, TextSpec(), scores=scores_for(ids, tokenizer.vocab_size))
    ring.run()
    got = ring.of(1)
    assert b"".join(entry.raw for entry in got.entries) == got.text.encode() == tokenizer.decode(ids).encode()
    assert all(text for entry in got.entries for _, text, _, _ in entry.top)


def test_a_prompts_entries_join_to_its_text() -> None:
    rng = random.Random(5)
    for family in FAMILIES:
        tokenizer = FAMILIES[family]()
        manager = DetokManager(tokenizer, DetokConfig())
        ids = tokenizer.encode(rng.choice(CORPUS), add_special_tokens=False)
        ids = [tokenizer.token_to_id("<s>") or 0, *ids]
        scores = RowLogprobs(
            -1,
            [None] + [-1.0] * (len(ids) - 1),
            [0] * len(ids),
            [[]] + [[3]] * (len(ids) - 1),
            [[]] + [[-1.0]] * (len(ids) - 1),
        )
        opened = Opened(1, b"\x90")
        output = manager.process(
            [TokenBatch(0, 1, 1, opened=[opened], prompt_logprobs=[PromptLogprobs(1, pack_ids(ids), scores)])]
        )
        (prompt,) = output.text_batches[0].prompt_logprobs
        assert b"".join(entry.raw for entry in prompt.tokens).decode() == tokenizer.decode(ids)
        assert [entry.token_id for entry in prompt.tokens] == ids
        assert prompt.tokens[0].logprob is None and prompt.tokens[1].logprob == -1.0


def test_entries_survive_a_lost_state() -> None:
    """After a gap the engine tells all again, scores included; api drops what it has by index."""
    tokenizer = byte_level()
    ids = tokenizer.encode(CORPUS[5], add_special_tokens=False)
    scores = scores_for(ids, tokenizer.vocab_size)
    ring = Ring(tokenizer)
    ring.engine.add(1, ids, TextSpec(), scores=scores)
    for _ in range(9):
        ring.step()
    script = ring.engine.scripts[1]
    merged = RowLogprobs(
        0,
        [s.logprobs[0] for s in scores],
        [s.ranks[0] for s in scores],
        [s.top_ids[0] for s in scores],
        [s.top_logprobs[0] for s in scores],
    )
    again = TokenBatch(
        0, 1, 60, opened=[Opened(1, script.spec)], request_ids=[1], first_index=[0], num_tokens=[len(ids)],
        token_ids=pack_ids(ids), logprobs=[merged],
    )  # fmt: skip
    ring._waiting.append(again)
    ring.run()
    got = ring.of(1)
    assert [entry.token_id for entry in got.entries] == ids
    assert b"".join(entry.raw for entry in got.entries) == CORPUS[5].encode()


def test_scores_of_ids_that_are_here_already_are_dropped_with_them() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    scores = scores_for(ids, tokenizer.vocab_size)
    ring = Ring(tokenizer)
    ring.engine.add(1, ids, TextSpec(), scores=scores)
    for _ in range(4):
        ring.step()
    overlap = RowLogprobs(
        0, [s.logprobs[0] for s in scores[1:6]], [1] * 5, [s.top_ids[0] for s in scores[1:6]], [[-0.1, -2.0]] * 5
    )
    ring._waiting.append(
        TokenBatch(
            0, 1, 60, request_ids=[1], first_index=[1], num_tokens=[5], token_ids=pack_ids(ids[1:6]), logprobs=[overlap]
        )
    )
    ring.engine.scripts[1].sent = 6
    ring.run()
    assert [entry.token_id for entry in ring.of(1).entries] == ids
    assert [entry.logprob for entry in ring.of(1).entries] == [-0.5 * i for i in ids]


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("begin", [b"\xe6", b"\xe6\xbc", b"a\xff", b""])
def test_scores_may_begin_inside_a_character(kind: str, begin: bytes) -> None:
    """As those of a request do that a new engine goes on with."""
    tokenizer = byte_level()
    old, new = spelled(begin), spelled("漢b".encode()[len(begin) % 3 :])
    manager = DetokManager(tokenizer, DetokConfig(detokenizer=kind))
    spec = msgspec.msgpack.encode(TextSpec())
    manager.process([TokenBatch(0, 1, 1, opened=[Opened(1, spec, pack_ids(old))])])
    offsets: list[int] = []
    for at, token_id in enumerate(new):
        scores = scores_for([token_id], tokenizer.vocab_size)
        batch = TokenBatch(
            0, 1, 2 + at, request_ids=[1], first_index=[len(old) + at], num_tokens=[1], token_ids=pack_ids([token_id]),
            logprobs=scores,
        )  # fmt: skip
        for row in manager.process([batch]).text_batches[0].logprobs:
            offsets += [entry.text_offset for entry in row.tokens]
    whole = begin + bytes(tokenizer_bytes(new))
    assert len(offsets) == len(new)
    assert offsets == [len(take_utf8(b"", whole[: len(begin) + at])[0]) for at in range(len(new))]


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), llama2(), word_piece()], ids=["byte_level", "llama2", "word_piece"]
)
def test_prompt_ids_that_only_the_model_has_are_shown_by_number(tokenizer: HFTokenizer) -> None:
    """A model's output layer may be larger than its tokenizer; such ids may stand in a prompt."""
    manager = DetokManager(tokenizer, DetokConfig())
    beyond = tokenizer.vocab_size + 3
    ids = [beyond, *tokenizer.encode("dog", add_special_tokens=False), beyond]
    num = len(ids)
    scores = RowLogprobs(-1, [None, *[-1.0] * (num - 1)], [0] * num, [[beyond]] * num, [[-1.0]] * num)
    prompt = PromptLogprobs(1, pack_ids(ids), scores)
    output = manager.process([TokenBatch(0, 1, 1, opened=[Opened(1, b"\x90")], prompt_logprobs=[prompt])])
    (entries,) = output.text_batches[0].prompt_logprobs
    assert [entry.text for entry in entries.tokens][:: num - 1] == [f"token_id:{beyond}"] * 2
    assert b"".join(entry.raw for entry in entries.tokens).decode().strip() == "dog"
    assert all(entry.top[0][1:3] == (f"token_id:{beyond}", b"") for entry in entries.tokens)

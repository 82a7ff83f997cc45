"""The detokenizer between a scripted engine and a strict api: chunkings, stops, lost states, restarts, faults."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.config import DetokConfig
from nanoserve.detok.manager import DetokManager
from nanoserve.errors import StartupError
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import (
    AbortCause,
    Accepted,
    EmitMode,
    EngineStats,
    Finished,
    FinishReason,
    Opened,
    Resync,
    RowLogprobs,
    TextSpec,
    TokenBatch,
)
from tests.unit.detok_ring import Ring
from tests.unit.detok_tokenizers import (
    CORPUS,
    FAMILIES,
    POISON,
    SPECIALS,
    Breaking,
    byte_level,
    byte_level_stripped,
    gemma_like,
    llama2,
    reference,
)

TOKENIZER = byte_level()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def byte_ids(raw: bytes) -> list[int]:
    """One token per byte."""
    from nanoserve.detok.token_table import _BYTE_OF_CHAR

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


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_many_streams_in_mixed_batches_are_each_exact(family: str, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = FAMILIES[family]()
    ring = Ring(tokenizer, detokenizer=kind)
    wanted: dict[int, str] = {}
    for request_id in range(1, 9):
        text = rng.choice(CORPUS)[rng.randrange(20) :]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        token_ids = [rng.randrange(tokenizer.vocab_size) if rng.random() < 0.2 else i for i in token_ids]
        spec = TextSpec(
            emit=rng.choice(list(EmitMode)),
            skip_special_tokens=rng.random() < 0.5,
            prompt_tail=tuple(rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(6))),
        )
        ring.engine.add(request_id, token_ids, spec)
        wanted[request_id] = reference(tokenizer, token_ids, list(spec.prompt_tail), skip=spec.skip_special_tokens)
    while not ring.engine.is_done:
        sizes = {request_id: rng.randrange(4) for request_id in wanted}
        ring.step(sizes, drain=rng.random() < 0.6)
    ring.drain()
    for request_id, text in wanted.items():
        got = ring.of(request_id)
        assert got.text == text
        assert got.ids == ring.engine.scripts[request_id].token_ids
        assert got.num_finished == 1
        assert got.finished is not None and got.finished.finished.reason is FinishReason.LENGTH
    assert ring.detok.num_tracked == 0


@pytest.mark.rule(52)
def test_the_first_token_is_text_at_once_and_every_ascii_token_after_it() -> None:
    ring = Ring(TOKENIZER)
    ids = ids_of("The quick brown fox jumps")
    ring.engine.add(1, ids, TextSpec())
    for at in range(len(ids)):
        ring.step()
        assert ring.of(1).text == TOKENIZER.decode(ids[: at + 1])


def test_final_mode_is_one_text_at_the_end_with_ids_on_the_way() -> None:
    ids = ids_of(CORPUS[4])
    ring = run_one(ids, TextSpec(emit=EmitMode.FINAL))
    got = ring.of(1)
    assert [delta for delta in got.deltas if delta] == [TOKENIZER.decode(ids)]
    assert got.ids == ids


@pytest.mark.rule(47)
def test_held_bytes_are_flushed_once_at_the_end() -> None:
    for emit in EmitMode:
        assert run_one(ids_of("ab") + byte_ids(b"\xf0\x9f"), TextSpec(emit=emit)).of(1).text == "ab\ufffd"


@pytest.mark.rule(59)
def test_the_final_stop_id_is_no_text_unless_asked_for() -> None:
    word = ids_of(" day")
    spec = TextSpec(skip_special_tokens=False)
    for stop_id in (word[-1], TOKENIZER.token_to_id("</s>")):
        assert stop_id is not None
        ids = [*ids_of("Good"), *word[:-1], stop_id]
        got = run_one(ids, spec, stop_token_id=stop_id).of(1)
        assert got.text == TOKENIZER.decode(ids[:-1], skip_special_tokens=False)
        assert got.ids == ids
        assert got.finished is not None and got.finished.finished.stop_token_id == stop_id
        shown = TextSpec(skip_special_tokens=False, include_stop_str_in_output=True)
        assert run_one(ids, shown, stop_token_id=stop_id).of(1).text == TOKENIZER.decode(ids, skip_special_tokens=False)


# ---- stop strings ----------------------------------------------------------------------------------------


def word(text: str) -> list[int]:
    """The pieces of `text` as single-character tokens, so that a stop string is never one token."""
    return byte_ids(text.encode())


@pytest.mark.rule(55)
@pytest.mark.parametrize(
    ("token", "count", "stops", "text", "stop"),
    [
        (" yes", 12, ["es ye"], " y", "es ye"),
        (" yes", 12, ["s"], " ye", "s"),
        (" yes", 12, [" yes yes yes yes no"], " yes" * 12, None),
        (" two", 40, ["Q" * 120], " two" * 40, None),
        ("ab", 9, ["bab", "ba"], "a", "ba"),
        ("ab", 9, ["abab", "b"], "a", "b"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("emit", EmitMode)
def test_known_cases(
    token: str, count: int, stops: list[str], text: str, stop: str | None, size: int, emit: EmitMode
) -> None:
    got = run_one(word(token) * count, TextSpec(stop=tuple(stops), emit=emit), size).of(1)
    assert got.text == text
    assert got.finished is not None
    assert got.finished.stop_string == stop
    assert got.finished.finished.reason is (FinishReason.LENGTH if stop is None else FinishReason.STOP)
    assert got.num_finished == 1


@pytest.mark.rule(43)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_all_chunkings_give_the_same_text_and_the_same_count(data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="ab é🔥", min_size=1, max_size=30))
    ids = ids_of(text) if data.draw(st.booleans()) else byte_ids(text.encode())
    spec = TextSpec(
        stop=tuple(data.draw(st.lists(st.text(alphabet="ab é🔥", min_size=1, max_size=4), min_size=1, max_size=3))),
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.sampled_from([0, 0, 3, 7])),
        emit=data.draw(st.sampled_from(list(EmitMode))),
    )
    one = run_one(ids, spec).of(1)
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=30))
    other = run_one(ids, spec, sizes).of(1)
    assert (other.text, other.ids, other.finished) == (one.text, one.ids, one.finished) or (
        # only the numbers that an end of the engine's own carries may differ
        other.text == one.text
        and other.ids == one.ids
        and other.finished is not None
        and one.finished is not None
        and other.finished.stop_string == one.finished.stop_string
        and other.finished.finished.num_output_tokens == one.finished.finished.num_output_tokens
        and other.finished.finished.reason == one.finished.finished.reason
    )
    # The oracle: token by token on whole decodes, the last unfinished character left out.
    wanted, kept = TOKENIZER.decode(ids), len(ids)
    for count in range(max(1, spec.min_tokens + 1), len(ids) + 1):
        old = TOKENIZER.decode(ids[: count - 1]).rstrip("\ufffd")
        new = TOKENIZER.decode(ids[:count]).rstrip("\ufffd")
        ends = [
            (end, stop) for end in range(len(old) + 1, len(new) + 1) for stop in spec.stop if new[:end].endswith(stop)
        ]
        if ends:
            end = min(end for end, _ in ends)
            stop = max((stop for at, stop in ends if at == end), key=len)
            wanted, kept = new[: end if spec.include_stop_str_in_output else end - len(stop)], count
            break
    assert one.text == wanted
    assert one.ids == ids[:kept]


@pytest.mark.rule(60)
def test_a_stop_string_ends_the_stream_at_once_and_tells_the_engine() -> None:
    ring = Ring(TOKENIZER)
    ids = word("one STOP two three")
    ring.engine.add(1, ids, TextSpec(stop=("STOP",)))
    hit = len("one STOP")
    for _ in range(hit):
        assert 1 not in ring.api.received or ring.of(1).finished is None
        ring.step()
    got = ring.of(1)
    assert got.text == "one " and got.ids == ids[:hit]
    assert got.finished is not None and got.finished.finished.num_output_tokens == hit
    (abort,) = ring.engine.aborts
    assert (abort.cause, abort.request_ids, abort.num_kept) == (AbortCause.STOP_STRING, [1], [hit])
    ring.run()
    assert got.num_finished == 1 and ring.detok.num_tracked == 0


@pytest.mark.rule(60)
def test_overrun_is_counted_and_never_shown() -> None:
    ring = Ring(TOKENIZER)
    ring.engine.add(1, word("one STOP two three"), TextSpec(stop=("STOP",)))
    for _ in range(11):
        ring.step(drain=False)
    ring.drain()  # three ids too many in the same drain
    assert ring.of(1).text == "one " and len(ring.of(1).ids) == 8
    late = TokenBatch(0, 1, 99, request_ids=[1], first_index=[11], num_tokens=[2], token_ids=pack_ids([5, 6]))
    output = ring.detok.process([late])
    assert not output.to_engine
    stats = ring.detok.process([TokenBatch(0, 1, 100, stats=EngineStats())]).text_batches[0].detok_stats
    assert stats is not None and stats.stop_overrun_tokens == 5
    ring.run()
    assert ring.of(1).num_finished == 1 and ring.detok.num_tracked == 0


def test_a_stop_string_wins_over_the_length_in_the_same_token() -> None:
    for size in (1, 30):
        got = run_one(word("yes no"), TextSpec(stop=("no",)), size).of(1)
        assert got.text == "yes "
        assert got.finished is not None and got.finished.finished.reason is FinishReason.STOP
        assert got.finished.finished.num_prompt_tokens == 3  # the engine's own numbers where they are at hand


@pytest.mark.rule(57)
def test_an_unfinished_character_is_no_match_for_its_replacement() -> None:
    ids = byte_ids("🔥".encode() * 3)
    got = run_one(ids, TextSpec(stop=("\ufffd",))).of(1)
    assert got.text == "🔥🔥🔥"
    cut = run_one(ids[:-1], TextSpec(stop=("\ufffd",))).of(1)
    assert cut.text == "🔥🔥\ufffd"
    assert cut.finished is not None and cut.finished.finished.reason is FinishReason.LENGTH


@pytest.mark.rule(53)
@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_that_is_a_special_token_stops_at_its_id(skip: bool) -> None:
    special = TOKENIZER.token_to_id(SPECIALS[2])
    assert special is not None
    ids = [*word("ab"), special, *word("cd")]
    got = run_one(ids, TextSpec(stop=(SPECIALS[2],), skip_special_tokens=skip)).of(1)
    assert got.text == "ab"
    assert got.finished is not None and got.finished.stop_string == SPECIALS[2]
    assert got.finished.finished.num_output_tokens == 3


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_what_comes_after_a_stop_token_does_not_touch_the_text_before_it(skip: bool, include: bool, size: int) -> None:
    """Unfinished bytes before it are flushed, those after it are not there, however the ids came."""
    special = TOKENIZER.token_to_id(SPECIALS[2])
    assert special is not None
    euro = byte_ids("€".encode())
    spec = TextSpec(stop=(SPECIALS[2],), skip_special_tokens=skip, include_stop_str_in_output=include)
    shown = SPECIALS[2] if include and not skip else ""
    split = run_one([*word("ab"), *euro[:1], special, *euro[1:], *word("cd")], spec, [size] * 40).of(1)
    assert split.text == "ab\ufffd" + shown
    behind = run_one([*word("ab"), special, *euro[:2]], spec, [size] * 40).of(1)
    assert behind.text == "ab" + shown
    assert behind.finished is not None and behind.finished.stop_string == SPECIALS[2]


@pytest.mark.rule(59)
@pytest.mark.parametrize("size", [1, 2, 50])
def test_a_stop_token_before_min_tokens_does_not_count(size: int) -> None:
    special = TOKENIZER.token_to_id(SPECIALS[2])
    assert special is not None
    ids = [*word("ab"), special, *word("cd"), special, *word("ef")]
    first = len(word("ab")) + 1
    for min_tokens, text in ((first - 1, "ab"), (first, "abcd")):
        got = run_one(ids, TextSpec(stop=(SPECIALS[2],), min_tokens=min_tokens), [size] * 40).of(1)
        assert got.text == text


@pytest.mark.parametrize("size", [1, 2, 50])
def test_a_beginning_in_bytes_stops_at_the_same_token_however_it_came(size: int) -> None:
    tokenizer = byte_level_stripped()
    ring = Ring(tokenizer)
    ring.engine.add(1, [*byte_ids(b"\xff\xf0\x9f"), *word("ab")], TextSpec(stop=("\ufffd",)))
    ring.run(size)
    end = ring.of(1).finished
    assert end is not None and (ring.of(1).text, end.finished.num_output_tokens) == ("", 1)


@pytest.mark.parametrize("size", [1, 3, 50])
def test_patterns_stop_like_strings_and_the_first_to_end_wins(size: int) -> None:
    ids = word("say <b>one</b> and 42 times")
    spec = TextSpec(stop=("times",), stop_regex=(r"\d+", r"</?\w>"))
    got = run_one(ids, spec, size).of(1)
    assert got.text == "say " and got.ids == ids[: len("say <b>")]
    assert got.finished is not None and got.finished.stop_string == r"</?\w>"
    later = TextSpec(stop=("and",), stop_regex=(r"\d{2}",), min_tokens=len("say <b>one</b> and"))
    got = run_one(ids, later, size).of(1)
    assert got.text == "say <b>one</b> and " and got.finished is not None
    assert got.finished.stop_string == r"\d{2}"
    shown = TextSpec(stop_regex=(r"o\w+",), include_stop_str_in_output=True)
    assert run_one(ids, shown, size).of(1).text == "say <b>on"


def test_a_pattern_that_api_should_have_refused_is_that_requests_error() -> None:
    got = run_one(word("ab"), TextSpec(stop_regex=("(",))).of(1)
    assert got.finished is not None and got.finished.finished.reason is FinishReason.ERROR


@pytest.mark.rule(56)
def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    ring = Ring(TOKENIZER)
    ring.engine.add(1, word("ab STOX yz"), TextSpec(stop=("STOP",)))
    seen = []
    while not ring.engine.is_done:
        ring.step()
        seen.append(ring.of(1).text)
    assert seen[:8] == ["a", "ab", "ab ", "ab ", "ab ", "ab ", "ab STOX", "ab STOX "]


# ---- states that are lost --------------------------------------------------------------------------------


@pytest.mark.rule(42)
@pytest.mark.parametrize("max_states", [1, 8])
def test_a_small_cap_under_many_streams_changes_no_text(max_states: int) -> None:
    rng = random.Random(3)
    ring = Ring(TOKENIZER, max_states=max_states)
    wanted = {}
    for request_id in range(1, 65):
        text = rng.choice(CORPUS) + str(request_id)
        stop = ("zzz",) if request_id % 3 else ()
        ring.engine.add(request_id, ids_of(text), TextSpec(stop=stop, emit=EmitMode(request_id % 2)))
        wanted[request_id] = text
    ring.run()
    for request_id, text in wanted.items():
        assert ring.of(request_id).text == text
        assert ring.of(request_id).finished is not None
    assert ring.engine.num_resyncs > 100
    assert ring.detok.num_tracked == 0


@pytest.mark.rule(42)
def test_the_least_recently_used_state_is_the_one_to_go() -> None:
    ring = Ring(TOKENIZER, max_states=2)
    for request_id in (1, 2, 3):
        ring.engine.add(request_id, ids_of("The quick brown fox"), TextSpec())
    ring.step({1: 0, 2: 0, 3: 0})  # all opened in this order: 1 goes
    ring.step({1: 0, 2: 1, 3: 0})  # 2 is used again, so 3 is the oldest
    ring.step({1: 1, 2: 0, 3: 0})  # 1 has to be asked for, comes back with the next answer
    assert ring.engine.num_resyncs == 1
    ring.step({1: 0, 2: 0, 3: 0})
    ring.step({1: 0, 2: 1, 3: 0})
    assert ring.engine.num_resyncs == 1  # 2 was never lost


@pytest.mark.rule(40, 42)
def test_a_gap_is_asked_for_and_a_repeat_is_dropped() -> None:
    ring = Ring(TOKENIZER)
    ids = ids_of(CORPUS[3])
    ring.engine.add(1, ids, TextSpec())
    for at in range(6):
        ring.step(drain=at != 3)
        if at == 3:
            ring._waiting.clear()  # lost on the way
    assert ring.engine.num_resyncs == 1
    again = TokenBatch(0, 1, 50, request_ids=[1], first_index=[0], num_tokens=[3], token_ids=pack_ids(ids[:3]))
    ring._waiting.append(again)
    ring.run()
    assert ring.of(1).text == CORPUS[3] and ring.of(1).ids == ids


@pytest.mark.rule(40)
def test_a_lost_last_row_is_noticed_by_its_count() -> None:
    ring = Ring(TOKENIZER)
    ring.engine.add(1, ids_of("The quick"), TextSpec())
    ring.step()
    script = ring.engine.scripts[1]
    script.sent = len(script.token_ids)
    script.finished = Finished(1, FinishReason.LENGTH, num_output_tokens=script.sent)
    ring._waiting.append(TokenBatch(0, 1, 9, finished=[script.finished]))
    ring.drain()
    assert ring.of(1).finished is None
    ring.run()
    assert ring.of(1).text == "The quick" and ring.of(1).num_finished == 1


@pytest.mark.parametrize("at", [0, 1, 5, 20])
def test_a_detokenizer_that_dies_loses_nothing(at: int) -> None:
    ring = Ring(TOKENIZER)
    for request_id in range(1, 30):
        stop = ("lazy",) if request_id % 2 else ()
        ring.engine.add(
            request_id, ids_of(CORPUS[request_id % 6]), TextSpec(stop=stop, emit=EmitMode(request_id % 3 == 0))
        )
    for _ in range(at):
        ring.step()
    ring.step(drain=False)  # this batch dies with it
    ring.restart_detok()
    ring.run()
    for request_id in range(1, 30):
        text = CORPUS[request_id % 6]
        wanted = text.split("lazy")[0] if request_id % 2 else text
        assert ring.of(request_id).text == wanted
        assert ring.of(request_id).finished is not None
    assert ring.detok.num_tracked == 0


def test_a_new_engine_opens_again_what_lives_and_the_dead_one_is_not_heard() -> None:
    ids = ids_of(CORPUS[0])
    ring = Ring(TOKENIZER)
    ring.engine.add(1, ids, TextSpec())
    for _ in range(10):
        ring.step()
    spec = ring.engine.scripts[1].spec
    old = TokenBatch(0, 1, 11, request_ids=[1], first_index=[10], num_tokens=[1], token_ids=pack_ids([7]))
    new = TokenBatch(
        0, 2, 1, opened=[Opened(1, spec, pack_ids(ids[:8]))],
        request_ids=[1], first_index=[8], num_tokens=[len(ids) - 8], token_ids=pack_ids(ids[8:]),
        finished=[Finished(1, FinishReason.LENGTH, num_output_tokens=len(ids))],
    )  # fmt: skip
    output = ring.detok.process([new, old])
    assert output.text_batches[0].engine_incarnation == 2
    ring.api.take(output.text_batches[0])
    assert ring.of(1).text == CORPUS[0] and ring.of(1).num_finished == 1
    assert ring.detok.num_tracked == 0


def test_a_new_engine_makes_old_states_void() -> None:
    """Only what it opens lives on; a row that goes on with an old state is a gap like any other."""
    ring = Ring(TOKENIZER)
    for request_id in (1, 2):
        ring.engine.add(request_id, ids_of("The quick brown fox"), TextSpec())
    ring.step()
    ring.step()
    row = TokenBatch(0, 2, 1, request_ids=[2], first_index=[1], num_tokens=[1], token_ids=pack_ids([7]))
    output = ring.detok.process([row])
    assert output.to_engine == [Resync([2])]
    assert not output.text_batches and ring.detok.num_states == 0


# ---- faults, odd requests, bookkeeping -------------------------------------------------------------------


@pytest.mark.rule(11, 50)
def test_an_id_outside_the_vocabulary_ends_that_request_alone() -> None:
    ring = Ring(TOKENIZER)
    good = ids_of("The quick brown fox")
    ring.engine.add(1, [*ids_of("The"), TOKENIZER.vocab_size, 5], TextSpec())
    ring.engine.add(2, good, TextSpec())
    ring.engine.add(3, [*ids_of("The"), -5, 5], TextSpec())
    ring.run()
    for request_id in (1, 3):
        got = ring.of(request_id)
        assert got.finished is not None and got.num_finished == 1
        assert got.finished.finished.reason is FinishReason.ERROR
        assert got.finished.finished.failure is not None and got.finished.finished.failure.status == 500
    assert ring.of(2).text == "The quick brown fox"
    assert {abort.cause for abort in ring.engine.aborts} == {AbortCause.TEXT_FAILED}
    assert ring.detok.num_tracked == 0


@pytest.mark.rule(50)
def test_a_tokenizer_that_panics_ends_the_request_alone_that_has_such_a_token() -> None:
    """Also where the token is only the prompt's, or only a name beside a logprob."""
    ring = Ring(Breaking(TOKENIZER), detokenizer="auto")
    fox = ids_of("The quick brown fox")
    scores = [RowLogprobs(0, [-1.0], [0], [[POISON]], [[-2.0]]) for _ in fox]
    ring.engine.add(1, [*ids_of("The"), POISON, 5], TextSpec())
    ring.engine.add(2, fox, TextSpec(prompt_tail=(POISON,)))
    ring.engine.add(3, fox, TextSpec(), scores=scores)
    ring.run()
    assert ring.detok.decoder_name == "window"
    end = ring.of(1).finished
    assert end is not None and end.finished.reason is FinishReason.ERROR
    assert [ring.of(i).text for i in (2, 3)] == ["The quick brown fox"] * 2
    assert len(ring.of(3).entries) == len(fox)


def test_text_options_that_cannot_be_read_are_that_requests_error() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig())
    output = manager.process([TokenBatch(0, 1, 1, opened=[Opened(1, b"\xff"), Opened(2, b"\x90")])])
    (record,) = output.text_batches[0].finished
    assert record.finished.request_id == 1 and record.finished.reason is FinishReason.ERROR


def test_ids_only() -> None:
    for ring, spec in ((Ring(TOKENIZER), TextSpec(detokenize=False)), (Ring(None), TextSpec())):
        ring.engine.add(1, [3, 4, 100_000], spec)
        ring.run()
        assert ring.of(1).text == "" and ring.of(1).ids == [3, 4, 100_000]
        assert ring.of(1).num_finished == 1 and ring.detok.num_tracked == 0


def test_a_refusal_without_an_opening_reaches_api() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig())
    refused = Finished(5, FinishReason.ERROR)
    output = manager.process([TokenBatch(0, 1, 1, finished=[refused])])
    assert [record.finished for record in output.text_batches[0].finished] == [refused]
    assert not output.to_engine and manager.num_tracked == 0


def test_rows_go_to_the_api_that_owns_them_and_stats_to_all() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig(), num_apis=2, detok_index=1, incarnation=4)
    second = (1 << 55) | 7
    batch = TokenBatch(
        0, 3, 9, accepted=[Accepted(second, 2)], opened=[Opened(second, b"\x90")], stats=EngineStats(steps=9)
    )
    output = manager.process([batch])
    assert sorted(output.text_batches) == [0, 1]
    for index, text in output.text_batches.items():
        assert (text.detok_index, text.incarnation, text.engine_incarnation, text.step) == (1, 4, 3, 9)
        assert text.engine_stats == EngineStats(steps=9) and text.detok_stats is not None
        assert [accepted.request_id for accepted in text.accepted] == ([second] if index else [])
    lag = manager.process([TokenBatch(0, 3, 10), TokenBatch(0, 3, 11, stats=EngineStats())])
    stats = lag.text_batches[0].detok_stats
    assert stats is not None and stats.lag_steps == 2 and stats.num_states == 1
    assert manager.process([]).text_batches == {}


@pytest.mark.rule(42)
def test_a_thousand_requests_with_aborts_leave_nothing() -> None:
    rng = random.Random(11)
    ring = Ring(TOKENIZER, max_states=64)
    for request_id in range(1, 1001):
        stop = ("yes", "é") if request_id % 4 == 0 else ()
        ring.engine.add(request_id, ids_of(rng.choice(CORPUS))[: rng.randrange(1, 40)], TextSpec(stop=stop))
    for _ in range(60):
        ring.step({request_id: rng.randrange(3) for request_id in ring.engine.scripts})
        for request_id in rng.sample(list(ring.engine.scripts), 6):
            script = ring.engine.scripts[request_id]
            if script.opened and script.finished is None:
                script.finished = Finished(request_id, FinishReason.ABORT, num_output_tokens=script.sent)
                ring._ended.append(script.finished)
    ring.run()
    assert ring.detok.num_tracked == 0
    assert all(got.finished is not None for got in ring.api.received.values())
    assert len(ring.api.received) == 1000


def test_a_restart_asks_for_everything_once() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig(), incarnation=2)
    assert manager.resync_all() == Resync(request_ids=[], detok_index=0)
    row = TokenBatch(0, 1, 5, request_ids=[1], first_index=[4], num_tokens=[1], token_ids=pack_ids([9]))
    assert manager.process([row]).to_engine == []  # comes with the answer


def test_bytes_are_refused_where_they_are_not_proved() -> None:
    with pytest.raises(StartupError, match="--detokenizer bytes"):
        DetokManager(TOKENIZER, DetokConfig(detokenizer="bytes"), table=None)
    assert DetokManager(TOKENIZER, DetokConfig(), table=None).decoder_name == "window"
    assert DetokManager(llama2(), DetokConfig()).decoder_name == "bytes"
    assert DetokManager(gemma_like(), DetokConfig(detokenizer="window")).decoder_name == "window"

"""Stop strings and patterns through the whole detokenizer: for every chunking the same text, the same count."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import (
    AbortCause,
    EmitMode,
    EngineStats,
    FinishReason,
    TextSpec,
    TokenBatch,
)
from tests.unit.detok_ring import TOKENIZER, Ring, byte_ids, ids_of, run_one, word
from tests.unit.detok_tokenizers import (
    SPECIALS,
    byte_level_stripped,
)


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

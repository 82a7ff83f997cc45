"""Request bodies: strict decoding, unsupported and unknown fields, bounds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.api.schemas import UNSUPPORTED, BodyDecoder, ChatBody, CompletionBody, header_safe
from nanoserve.errors import RequestError

COMPLETION = BodyDecoder(CompletionBody)
CHAT = BodyDecoder(ChatBody)


def refused(data: bytes, decoder: BodyDecoder[CompletionBody] = COMPLETION) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decoder.decode(data)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.rule(9)
@pytest.mark.parametrize(
    "data",
    [b"", b"[1]", b"null", b"3", b'"x"', b"{} x", b"{", b"\xef\xbb\xbf{}", b'{"a":\xff}', b'{"a":"\\ud800"}',
     b'{"max_tokens":01}', b'{"temperature":NaN}', b'{"temperature":-Infinity}', b'{"temperature":1e999}',
     b'{"unknown":"\xfe"}', b'{"unknown":' + b"[" * 100_000],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    assert len(refused(data).message) < 300


@pytest.mark.rule(13)
@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"max_tokens":"5"}', "max_tokens"),
        (b'{"max_tokens":true}', "max_tokens"),
        (b'{"max_tokens":1.5}', "max_tokens"),
        (b'{"stop":5}', "stop"),
        (b'{"stop":["a",5]}', "stop"),
        (b'{"logit_bias":{"7":"y"}}', "logit_bias"),
        (b'{"stream":"yes"}', "stream"),
        (b'{"stream_options":[]}', "stream_options"),
        (b'{"echo":1}', "echo"),
    ],
)
def test_a_wrong_type_names_its_field_and_repeats_nothing(data: bytes, param: str) -> None:
    error = refused(data)
    assert error.param == param and param in error.message
    assert "yes" not in error.message


def test_every_field_may_be_null() -> None:
    for kind in (CompletionBody, ChatBody):
        body = dict.fromkeys(kind.__struct_fields__)
        BodyDecoder(kind).decode(msgspec.json.encode(body))


@pytest.mark.rule(9)
def test_duplicate_keys_last_one_wins() -> None:
    assert COMPLETION.decode(b'{"n":1,"n":2}').body.n == 2


@pytest.mark.rule(18, 82)
@pytest.mark.parametrize("key", sorted(UNSUPPORTED))
def test_known_but_unsupported_is_refused_unless_it_asks_for_nothing(key: str) -> None:
    error = refused(msgspec.json.encode({key: {"something": 1}}))
    assert (error.param, error.code) == (key, "unsupported_parameter")
    for harmless in (None, *UNSUPPORTED[key]):
        assert COMPLETION.decode(msgspec.json.encode({key: harmless})).unknown_keys == ()


@pytest.mark.rule(10)
def test_true_is_not_one() -> None:
    assert refused(b'{"best_of":true}').param == "best_of"


def test_unknown_keys_are_reported_or_refused() -> None:
    assert COMPLETION.decode(b'{"zeta":1,"alpha":[2],"metadata":{}}').unknown_keys == ("alpha", "zeta")
    with pytest.raises(RequestError, match="`beta`") as refusal:
        COMPLETION.decode(b'{"zeta":1,"beta":2,"metadata":{}}', strict=True)
    assert (refusal.value.param, refusal.value.code) == ("beta", "unknown_parameter")


def test_an_unknown_key_is_shown_in_printable_ascii() -> None:
    with pytest.raises(RequestError) as refusal:
        COMPLETION.decode('{"\u00e4\\n":1}'.encode(), strict=True)
    assert refusal.value.param == "??"


@given(st.lists(st.text(), max_size=30))
def test_unknown_keys_make_a_header_that_is_one_printable_line(keys: list[str]) -> None:
    value = header_safe(tuple(keys))
    assert value.isascii() and value.isprintable()


@pytest.mark.rule(9)
@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=20)
    )
)
def test_no_body_does_anything_but_decode_or_400(body: dict[str, object]) -> None:
    data = msgspec.json.encode(body)
    try:
        CHAT.decode(data)
    except RequestError as error:
        assert error.status == 400

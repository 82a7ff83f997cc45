"""The wire protocol does not change by accident: golden bytes of every struct, append-only fields, unique tags.

`golden_messages.json` holds for each struct the fields it had when it was written down and the bytes of one sample.
After appending a field (with a default) run `python -m tests.unit.test_messages`; any other change raises
PROTOCOL_VERSION first, which starts the file anew.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanoserve.ipc import messages

GOLDEN = Path(__file__).with_name("golden_messages.json")
STRUCTS = {
    name: item
    for name, item in vars(messages).items()
    if inspect.isclass(item) and issubclass(item, msgspec.Struct) and item.__name__ == name
}


def sample(kind: Any, numbers: Iterator[int]) -> Any:
    """A value of this type in which no two numbers are equal, so that a swap of fields shows."""
    if kind in STRUCTS.values():
        hints = typing.get_type_hints(kind)
        return kind(**{name: sample(hints[name], numbers) for name in kind.__struct_fields__})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return sample(next(part for part in arguments if part is not type(None)), numbers)
    if origin is list:
        return [sample(arguments[0], numbers), sample(arguments[0], numbers)]
    if origin is tuple:
        parts = arguments[:1] * 2 if arguments[-1] is ... else arguments
        return tuple(sample(part, numbers) for part in parts)
    if origin is dict:
        return {sample(arguments[0], numbers): sample(arguments[1], numbers)}
    if inspect.isclass(kind) and issubclass(kind, enum.IntEnum):
        return list(kind)[-1]
    number = next(numbers)
    return {int: number, float: number + 0.5, str: f"s{number}", bytes: b"b%d" % number, bool: True}[kind]


def written_now() -> dict[str, Any]:
    return {
        "version": messages.PROTOCOL_VERSION,
        "structs": {
            name: {
                "fields": list(kind.__struct_fields__),
                "bytes": msgspec.msgpack.encode(sample(kind, itertools.count(1))).hex(),
            }
            for name, kind in STRUCTS.items()
        },
    }


def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", STRUCTS)
def test_bytes_of_an_older_peer_still_mean_the_same(name: str) -> None:
    if golden()["version"] != messages.PROTOCOL_VERSION:
        pytest.fail("PROTOCOL_VERSION was raised: write the golden file again")
    kind = STRUCTS[name]
    assert name in golden()["structs"], "new struct: write the golden file again"
    written = golden()["structs"][name]
    fields = written["fields"]
    assert list(kind.__struct_fields__[: len(fields)]) == fields, "fields may only be appended"
    old = msgspec.msgpack.decode(bytes.fromhex(written["bytes"]), type=kind)
    hints = typing.get_type_hints(kind)
    numbers = itertools.count(1)
    for field in fields:
        value = getattr(old, field)
        assert type(value) is type(sample(hints[field], numbers)), field
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=kind) == old


@pytest.mark.parametrize("name", STRUCTS)
def test_golden_bytes(name: str) -> None:
    written, now = golden()["structs"][name], written_now()["structs"][name]
    if now["fields"] == written["fields"]:
        assert now["bytes"] == written["bytes"]


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_positional_frozen_and_grow_by_defaults(name: str) -> None:
    config = STRUCTS[name].__struct_config__
    assert config.array_like and config.frozen
    fields = golden()["structs"].get(name, {"fields": []})["fields"]
    appended = set(STRUCTS[name].__struct_fields__[len(fields) :])
    for field in msgspec.structs.fields(STRUCTS[name]):
        assert field.name not in appended or not field.required, f"{name}.{field.name} needs a default"


def test_tags_are_unique_integers() -> None:
    tags = [kind.__struct_config__.tag for kind in STRUCTS.values() if kind.__struct_config__.tag is not None]
    assert all(isinstance(tag, int) for tag in tags)
    assert len(tags) == len(set(tags))


def test_no_struct_disappears() -> None:
    assert set(golden()["structs"]) <= set(STRUCTS)


def test_what_was_cut_short_may_lack_ids() -> None:
    lacking = {reason for reason in messages.FinishReason if not reason.is_regular}
    assert lacking == {messages.FinishReason.ABORT, messages.FinishReason.ERROR}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(written_now(), indent=1) + "\n")

"""Rules of the HTTP edge that hold for every field, path and log line, seen from outside on `--model sim`."""

from __future__ import annotations

import json
import re
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

import psutil
import pytest

from nanoserve.api.schemas import UNSUPPORTED, ChatBody, CompletionBody
from tests.e2e.harness import Server, wait_until
from tests.e2e.openai_stream import CHAT, COMPLETIONS, ask
from tests.sse_grammar import check_error

pytestmark = pytest.mark.slow

MARK = "Zq7marker"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a b c", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
}


def fields_of(kind: type, *wanted: type) -> list[str]:
    """Names of the fields that are one of these types, or null."""
    shape = {*wanted, types.NoneType}
    return [name for name, hint in get_type_hints(kind).items() if set(get_args(hint)) <= shape and get_args(hint)]


NUMERIC = [
    (path, name)
    for path, kind in ((COMPLETIONS, CompletionBody), (CHAT, ChatBody))
    for name in fields_of(kind, int, float)
]


def refused(server: Server, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    got, answer = server.post(path, body)
    assert got == status, (body, answer)
    check_error(answer)
    error: dict[str, Any] = answer["error"]
    return error


def test_the_numeric_fields_are_found() -> None:
    names = {name for _, name in NUMERIC}
    assert {"n", "max_tokens", "temperature", "seed", "timeout_s", "top_logprobs", "logprobs", "priority"} <= names


@pytest.mark.rule(10)
@pytest.mark.parametrize(("path", "name"), NUMERIC)
def test_every_number_has_a_type_and_two_bounds(sim_server: Server, path: str, name: str) -> None:
    for value in (2**70, -(2**70), 1e308, -1e308, True, "1", [1], {"a": 1}):
        error = refused(sim_server, path, {**BODIES[path], name: value})
        assert error["param"] in (name, {"max_completion_tokens": "max_tokens"}.get(name)), error
    assert sim_server.post(path, {**BODIES[path], name: None})[0] == 200


@pytest.mark.rule(12, 58)
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 129, "temperature": 1},
        {"prompt": ["a"] * 2049},
        {"prompt": ["a"] * 100, "n": 100, "temperature": 1},
        {"stop": [str(number) for number in range(17)]},
        {"stop": "x" * 1025},
        {"stop_token_ids": list(range(257))},
        {"logit_bias": {str(number): 1 for number in range(1025)}},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"allowed_token_ids": list(range(8193))},
        {"bad_words": ["x"] * 65},
        {"bad_words": ["x" * 257]},
        {"request_id": "x" * 129},
        {"cache_salt": "x" * 1025},
        {"prompt": "a " * 3_000_000},
        {"stop_regex": ["a", "b", "c", "d", "e"]},
        {"messages": [{"role": "user", "content": "x"}] * 4097},
        {"messages": [{"role": "x" * 65, "content": "x"}]},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_multiplies_work_is_capped_before_any_work(sim_server: Server, fields: dict[str, Any]) -> None:
    submitted = "nanoserve_requests_total "
    before = next(line for line in sim_server.get("/metrics")[1].splitlines() if line.startswith(submitted))
    began = time.monotonic()
    path = CHAT if "messages" in fields else COMPLETIONS
    refused(sim_server, path, {**BODIES[path], **fields})
    assert time.monotonic() - began < 5.0
    assert before in sim_server.get("/metrics")[1].splitlines()


@pytest.mark.rule(13)
@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"model": MARK}, 404),
        (COMPLETIONS, {"prompt": [MARK, 1]}, 400),
        (COMPLETIONS, {"seed": MARK}, 400),
        (COMPLETIONS, {"logit_bias": {MARK: 1}}, 400),
        (COMPLETIONS, {"response_format": {"type": MARK}}, 400),
        (COMPLETIONS, {"prompt": f"{MARK} " * 600_000}, 400),
        (CHAT, {"messages": MARK}, 400),
        (CHAT, {"messages": [{"role": MARK, "content": 5}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": MARK, "image_url": MARK}]}]}, 400),
        (CHAT, {"chat_template": MARK}, 400),
        (CHAT, {"chat_template_kwargs": {"messages": MARK}}, 400),
    ],
)
def test_an_error_never_repeats_the_input(sim_server: Server, path: str, fields: Any, status: int) -> None:
    error = refused(sim_server, path, {**BODIES[path], **fields}, status)
    assert MARK not in str(error)


@pytest.mark.rule(18, 82)
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_offered_is_refused_and_named(sim_server: Server, name: str) -> None:
    """Grammars, schemas, tools, templates and the like: never ignored."""
    assert refused(sim_server, CHAT, {**BODIES[CHAT], name: {"x": [MARK]}})["param"] == name


@pytest.mark.rule(25)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["\x04", "\x04\x06\x13", ["a", "\x04"]])
def test_characters_that_the_vocabulary_lacks(sim_server: Server, prompt: Any, stream: bool) -> None:
    """This tokenizer has no token for them: a prompt of nothing else is an empty one, beside others they vanish."""
    status, answer = sim_server.post("/tokenize", {"prompt": "\x04"})
    assert status == 200 and answer["tokens"] == []
    error = refused(sim_server, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "stream": stream})
    assert error["param"] == "prompt" and "empty" in error["message"]
    with_text = {"prompt": "a\x04 b", "max_tokens": 2, "temperature": 0}
    assert ask(sim_server, with_text).usage["prompt_tokens"] == len(
        sim_server.post("/tokenize", {"prompt": "a b"})[1]["tokens"]
    )


@pytest.mark.rule(7)
def test_http_on_loopback_is_the_only_network_listener(sim_server: Server) -> None:
    listening = set()
    for pid in (sim_server.pid, *sim_server.pids.values()):
        connections = psutil.Process(pid).net_connections("inet")
        listening |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    address = urlsplit(sim_server.base_url)
    assert listening == {("127.0.0.1", address.port)}


@pytest.mark.rule(15)
def test_two_live_requests_may_have_the_same_id(sim_server: Server) -> None:
    prompts = {f"request number {number} of the same name": number for number in range(8)}

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "request_id": "same", "rid": "same"}
        text: str = sim_server.post(COMPLETIONS, body)[1]["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        for prompt, text in zip(prompts, pool.map(ask, prompts), strict=True):
            assert text and (prompt * 10).startswith(text)  # the sim model repeats its prompt


@pytest.mark.rule(79)
def test_labels_of_metrics_come_from_fixed_sets(sim_server: Server) -> None:
    def names() -> set[str]:
        lines = sim_server.get("/metrics")[1].splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}

    def knock(word: str) -> None:
        sim_server.get(f"/{word}")
        sim_server.get(f"/v1/models/{word}")
        sim_server.post(COMPLETIONS, {**BODIES[COMPLETIONS], "model": word, "user": word, "request_id": word})

    knock("first")
    before = names()
    for number in range(20):
        knock(f"{MARK}{number}")
    assert names() == before and not any(MARK in name for name in before)


@pytest.mark.rule(74, 80)
def test_logs_hold_no_prompt_and_hang_ups_are_no_event(sim_server: Server) -> None:
    """Hang-ups before the first token, while streaming and while waiting for a whole answer; refusals too."""
    secret = "my secret 4711 is safe"
    before = {name: len(sim_server.log(name)) for name in sim_server.pids}
    body = {"prompt": secret, "max_tokens": 400, "temperature": 0}
    for number in range(12):
        if number % 3 == 0:
            stream = sim_server.stream(COMPLETIONS, body)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            continue
        connection = sim_server.connect()
        payload = json.dumps({**body, "stream": number % 3 == 1})
        connection.request("POST", COMPLETIONS, payload, {"Content-Type": "application/json"})
        connection.close()
    sim_server.post(COMPLETIONS, {**body, "temperature": 9})
    sim_server.post(COMPLETIONS, {**body, "prompt": [secret, 3]})
    sim_server.post(CHAT, {"messages": [{"role": "user", "content": secret}], "max_tokens": 1})
    idle = "nanoserve_num_requests_running 0.0"
    wait_until(lambda: idle in sim_server.get("/metrics")[1], 10.0, "the engine still runs a request")
    for name, length in before.items():
        new = sim_server.log(name)[length:]
        assert "4711" not in new and "Traceback" not in new
        assert len(re.findall(r" (WARNING|ERROR) ", new)) == 0, new

"""The detokenizer's switches, from outside: ids only, the window decoder, patterns as stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.harness import Server

pytestmark = pytest.mark.slow


@pytest.mark.rule(61)
def test_ids_in_ids_out(start_server: Callable[..., Server]) -> None:
    server = start_server("--model", "sim", "--skip-tokenizer-init").wait_ready()
    asked = {"model": "sim", "prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0}
    status, answer = server.post("/v1/completions", asked)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert choice["text"] == "" and len(choice["token_ids"]) == 3
    assert answer["usage"]["completion_tokens"] == 3
    for refused, param in (
        ({"prompt": "text"}, None),
        ({"stop": ["x"]}, "stop"),
        ({"stop_regex": "x"}, "stop_regex"),
        ({"logprobs": 1}, "logprobs"),
    ):
        status, answer = server.post("/v1/completions", asked | refused)
        assert status == 400 and "skip_tokenizer_init" in answer["error"]["message"]
        assert param is None or answer["error"]["param"] == param
    status, _ = server.post("/v1/chat/completions", {"model": "sim", "messages": [{"role": "user", "content": "x"}]})
    assert status == 400
    assert server.post("/v1/completions", asked)[0] == 200


@pytest.mark.parametrize("detokenizer", ["window", "bytes"])
def test_both_decoders_and_stops_of_both_kinds(start_server: Callable[..., Server], detokenizer: str) -> None:
    """The sim model says the prompt again, so what must come out is known."""
    server = start_server("--model", "sim", "--sim-step-ms", "20", "--detokenizer", detokenizer).wait_ready()
    text = "Naïve café 🔥🔥 in 日本 costs 1234 yen, he says. " * 3
    asked = {"model": "sim", "prompt": text, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/completions", asked)[1]["choices"][0]["text"]
    assert len(whole) > 90 and text.startswith(whole.rstrip("\ufffd")) and "\ufffd" not in whole[:-1]
    for stop, kept in (
        ({"stop": ["🔥 in"]}, "Naïve café 🔥"),
        ({"stop_regex": r"\d{3}"}, "Naïve café 🔥🔥 in 日本 costs "),
    ):
        answer = server.post("/v1/completions", asked | stop)[1]
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (kept, "stop")
        assert choice["stop_reason"] in ("🔥 in", r"\d{3}")
        assert "".join(_texts(server, asked | stop)) == kept
    status, answer = server.post("/v1/completions", asked | {"stop_regex": "(a"})
    assert status == 400 and answer["error"]["param"] == "stop_regex"
    assert _overrun(server) <= 4  # one row of a step per ending


def _texts(server: Server, asked: dict[str, object]) -> list[str]:
    events = [json.loads(data) for data in server.stream("/v1/completions", asked) if data != "[DONE]"]
    return [choice["text"] for event in events for choice in event["choices"]]


def _overrun(server: Server) -> float:
    lines = server.get("/metrics")[1].splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("nanoserve_stop_overrun_tokens_total ")))


@pytest.mark.rule(60)
def test_a_stop_string_costs_at_most_one_row_of_a_step(start_server: Callable[..., Server]) -> None:
    """On a real model the word of the stop reaches the engine during the next step: one row of it is in vain.

    Without drafts, so that a row is a token.
    """
    server = start_server("smollm2-135m", "--speculative-num-tokens", "0", "--max-model-len", "512").wait_ready(240.0)
    before = _overrun(server)

    def ask(number: int) -> Any:
        stop = " yes" * (5 + number % 4) + " "
        body = {
            "prompt": f"Go {number}",
            "max_tokens": 60,
            "temperature": 0,
            "logit_bias": {"9805": 100},
            "stop": [stop],
        }
        return server.post("/v1/completions", {"model": "smollm2-135m", **body})[1]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    for number, answer in enumerate(answers):
        assert answer["choices"] and answer["choices"][0]["text"] == ""  # the stop begins with the first token
        assert answer["usage"]["completion_tokens"] == 6 + number % 4
    overrun = _overrun(server) - before
    assert overrun <= len(answers)
    print(f"{overrun:.0f} rows in vain for {len(answers)} endings")

"""A failure after the first byte, on every streaming endpoint: its own error frame, and a grammatical end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.api_ring import Api, loaded_api, parse_events
from tests.sse_grammar import SseParser

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with loaded_api(tmp_path) as running:
        running.ring.script = lambda add: running.ring.token(add.request_id, "a")
        yield running


async def _stream(api: Api, path: str, body: dict[str, Any]) -> bytes:
    async with api.http.post(api.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200 and response.headers["X-Accel-Buffering"] == "no"
        api.ring.refuse(api.ring.added[-1].request_id, 500, "The step failed.")
        return await response.read()


@pytest.mark.rule(70)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "temperature": 1, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "n": 3, "temperature": 1}),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3}}),
        ("/generate", {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 4}}),
    ],
)
async def test_an_error_event_then_done(api: Api, path: str, body: dict[str, Any]) -> None:
    """Rule 14, and FEATURES' error frame."""
    data = await _stream(api, path, body)
    assert data.endswith(b"}\n\ndata: [DONE]\n\n") and data.count(b"[DONE]") == 1
    *_, last = parse_events(data)
    assert last["error"]["code"] == 500 and set(last["error"]) >= {"message", "type", "param", "code"}
    await api.ring.until(lambda: len(api.ring.added) == 2 or api.ring.aborted)
    assert not api.process.context.client.num_live


@pytest.mark.rule(70)
async def test_responses_fail_with_their_own_event(api: Api) -> None:
    data = await _stream(api, "/v1/responses", {"input": "x", "max_output_tokens": 3})
    parser = SseParser(named=True)
    events = [event.json for event in parser.feed(data)]
    parser.close()
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert b"[DONE]" not in data


@pytest.mark.rule(70)
async def test_messages_fail_with_their_own_event(api: Api) -> None:
    data = await _stream(api, "/v1/messages", {"messages": HI, "max_tokens": 3})
    parser = SseParser(named=True)
    events = [event.json for event in parser.feed(data)]
    parser.close()
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert b"[DONE]" not in data and b"message_stop" not in data

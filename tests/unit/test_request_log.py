"""The line of one request: sizes, times and ends; never what the client wrote."""

from __future__ import annotations

import logging

import pytest

from nanoserve.api.request_log import RequestLog, sampling_words
from nanoserve.api.stream import Outlet, RequestStream
from nanoserve.ipc.messages import Finished, FinishReason, LogChoice, SamplingParams, TextFinished
from tests.factories import make_add_request


def stream_of(request_id: int, text: str, reason: FinishReason | None) -> RequestStream:
    stream = RequestStream(make_add_request(request_id, range(5)), Outlet())
    stream.push_row(text, 0, 0, [7] * len(text))
    stream.first_ns = stream.submitted_ns + 40_000_000
    if reason is not None:
        stream.finish(TextFinished(Finished(request_id, reason, num_cached_tokens=3)))
    return stream


def test_sizes_times_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    streams = [stream_of(1, "secret", FinishReason.STOP), stream_of(2, "ab", None)]
    quiet = RequestLog(is_on=False, level=0)
    quiet.note("label", "", "/p", streams, 1.0)
    quiet.choose(LogChoice(log_requests=True))
    quiet.note("label", "job\nfaked line", "/p", streams, 1.0)
    quiet.note("nothing was sent", "", "/p", [], 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        r"request label: /p; 'job\nfaked line'; 2 choices; prompt 10, cached 3, output 8 tokens; "
        "first token 0.040 s; 1.000 s in all; stop, dropped"
    ]


def test_sampling_parameters_are_named_at_level_one_without_the_ids_in_them(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(is_on=True, level=0)
    log.choose(LogChoice(log_requests_level=1))
    assert log.is_on
    log.note("label", "label", "/p", [stream_of(1, "a", FinishReason.LENGTH)], 1.0)
    assert "max_tokens=" in caplog.records[-1].getMessage()
    sampling = SamplingParams(temperature=0.5, bad_words=((1, 2), (3,)), logit_bias={4711: 1.0}, max_tokens=16)
    assert sampling_words(sampling) == "temperature=0.5 logit_bias=(1) bad_words=(2)"
    assert sampling_words(SamplingParams()) == "defaults"


def test_the_level_of_the_log_changes_and_lines_of_requests_stay(caplog: pytest.LogCaptureFixture) -> None:
    ours = logging.getLogger("nanoserve")
    before = ours.level
    try:
        log = RequestLog(is_on=True, level=0)
        log.choose(LogChoice(log_level="error"))
        assert ours.level == logging.ERROR and log.is_on
        log.note("label", "", "/p", [stream_of(1, "a", FinishReason.LENGTH)], 1.0)
        assert len(caplog.records) == 1
    finally:
        ours.setLevel(before)

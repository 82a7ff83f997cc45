"""Failures are logged once a second and kind, and what is left out is counted."""

from __future__ import annotations

import logging

import pytest

from nanoserve.api.failure_log import FailureLog
from nanoserve.errors import RequestError


@pytest.mark.rule(80)
def test_repeats_are_counted_not_written(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            failures.note(f"r{step}", RequestError("full", status=503, code="server_overloaded"), step * 0.1)
        failures.note("other", RequestError("broke", status=500), 0.1)
        failures.note("client", RequestError("wrong", status=400), 0.2)
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "503" in line]) in (10, 11)
    assert "request r0 failed: 503 full" in lines and any("and 9 more like it" in line for line in lines)
    assert lines[-1] == "request other failed: 500 broke" and not any("wrong" in line for line in lines)

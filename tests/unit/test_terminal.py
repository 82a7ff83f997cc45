"""What the launcher prints once the server is ready."""

from __future__ import annotations

import os

from nanoserve.obs.terminal import ready_lines


def test_the_printed_command_sends_a_key_where_one_is_needed() -> None:
    open_lines = ready_lines("http://127.0.0.1:1", "m", "", [], 1.0)
    assert "Authorization" not in open_lines[-1]
    assert open_lines[1] == f"  pids: supervisor {os.getpid()}"  # the one to signal
    closed = ready_lines("http://127.0.0.1:1", "m", "", [], 1.0, needs_key=True)
    assert '-H "Authorization: Bearer $NANOSERVE_API_KEY"' in closed[-1]

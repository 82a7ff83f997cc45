"""What the operator sees of the launcher: one progress line while it starts, then the address and how to use it.

Owner: the supervisor. On a terminal the progress line is updated in place; elsewhere each stage is a plain line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

from nanoserve.ipc.messages import ProcessFacts

_log = logging.getLogger(__name__)


class Terminal:
    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._shown = ("", -1.0)
        self._open_line = False

    def line(self, text: str, level: int = logging.INFO) -> None:
        """A line that stays; it also goes to the supervisor's log."""
        _log.log(level, "%s", text)
        prefix = "\r\x1b[K" if self._open_line else ""
        self._open_line = False
        self._write(f"{prefix}{text}\n")

    def progress(self, stage: str, fraction: float) -> None:
        """What is being done now; `fraction` is 0..1 of this stage."""
        last_stage, last_fraction = self._shown
        step = 0.01 if self._live else 0.25
        if stage == last_stage and abs(fraction - last_fraction) < step and fraction < 1.0:
            return
        if (stage, fraction) == self._shown:
            return
        self._shown = (stage, fraction)
        text = f"{stage} {fraction:4.0%}" if fraction > 0 else f"{stage} ..."
        if self._live:
            self._open_line = True
            self._write(f"\r\x1b[K{text}")
        else:
            self.line(text)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the server goes on
            self._out.write(text)
            self._out.flush()


def ready_lines(
    url: str, model: str, model_dir: str, processes: Iterable[ProcessFacts], seconds: float, *, needs_key: bool = False
) -> list[str]:
    """The lines printed once the ring has turned, by the supervisor, who takes the signals. A key is named, never
    shown.
    """
    pids = ", ".join([f"supervisor {os.getpid()}", *(f"{process.name} {process.pid}" for process in processes)])
    return [
        f"READY {url} after {seconds:.1f} s, model {model}",
        f"  pids: {pids}",
        "  try:",
        f"    {_curl(url, model, model_dir, needs_key)}",
    ]


def _curl(url: str, model: str, model_dir: str, needs_key: bool) -> str:
    if has_chat_template(Path(model_dir)) if model_dir else False:
        path = "/v1/chat/completions"
        body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": "Say hello."}]}
    else:
        path, body = "/v1/completions", {"model": model, "prompt": "Once upon a time"}
    body |= {"max_tokens": 32, "temperature": 0, "stream": True}
    scheme, _, address = url.partition("+unix://")
    if address:
        url = f"--unix-socket {unquote(address)} {scheme}://localhost"
    key = ' -H "Authorization: Bearer $NANOSERVE_API_KEY"' if needs_key else ""
    return f"curl -N {url}{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def has_chat_template(model_dir: Path) -> bool:
    if any((model_dir / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return "chat_template" in json.loads((model_dir / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False

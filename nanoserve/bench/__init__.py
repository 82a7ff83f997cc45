"""Benchmarks, each one a program: `nanoserve bench NAME` or `python -m nanoserve.bench.NAME`."""

from __future__ import annotations

import sys


def program(name: str) -> str:
    """The benchmark `name` as it was started, for its usage line."""
    command = f"nanoserve bench {name}"  # as `nanoserve.__main__` says it
    return command if sys.argv[0] == command else f"python -m nanoserve.bench.{name.replace('-', '_')}"

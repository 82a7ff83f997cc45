"""Benchmarks, each a program: `nanoserve bench NAME`, or `python -m nanoserve.bench.NAME` with _ for -."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


def program(name: str) -> str:
    """The benchmark `name` as it was started, for its usage line."""
    command = f"nanoserve bench {name}"  # as `nanoserve.__main__` says it
    return command if sys.argv[0] == command else f"python -m nanoserve.bench.{name.replace('-', '_')}"


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Says each option's default, as the server's own --help does, and a mistake in one line."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        default = action.default
        has_none = default is None or default is False or default in ("", argparse.SUPPRESS, [], {})
        if not has_none:  # a number 0 is one
            shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
            action.help = f"{action.help or ''} [{shown.replace('%', '%%')}]".lstrip()
        return action

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser(name: str, docstring: str | None) -> argparse.ArgumentParser:
    """The parser of the benchmark `name`; its help begins with what the module says of itself."""
    return _Parser(prog=program(name), description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)

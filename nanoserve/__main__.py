"""The console script: `nanoserve serve`, `nanoserve logs`, `nanoserve healthcheck`.

Runs in the launcher process only. Imports stay inside the commands: `--help` must not load a server.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_USAGE = """\
usage: nanoserve COMMAND [options]

  serve [MODEL]   start a server (the same as python -m nanoserve.launch_server)
  logs DIR        the logs of all processes of a server, merged by time
  healthcheck     exit code 0 when a server on this machine is ready
  bench NAME      a benchmark; nanoserve bench --help lists them
  version         the version

`nanoserve COMMAND --help` shows the options of a command.
"""
_BENCHMARKS = (
    *("serve", "regress", "peers", "steps", "accuracy", "speculation"),
    *("micro", "host", "detok", "detok-table", "chaos", "chaos-peer", "soak", "api-cpu"),
)
_BENCH_END = "`nanoserve bench NAME --help` shows the options of one. What they need and compare: docs/benchmarks.md\n"

# What the operator can change.
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)


def serve_command(argv: Sequence[str], *, prog: str = "nanoserve serve") -> int:
    """Starts a server and stays until it ends; returns the exit code (`nanoserve.cli.EXIT_CODES`)."""
    from nanoserve.cli import load_config, unused_variables
    from nanoserve.errors import NanoserveError
    from nanoserve.supervisor import serve

    for line in unused_variables(os.environ):
        sys.stderr.write(f"nanoserve: {line}\n")
    try:
        return serve(load_config(argv, os.environ, prog=prog))
    except NanoserveError as error:
        sys.stderr.write(f"nanoserve: {error}\n")
        return 1
    except OSError as error:
        if error.errno not in _SCARCE:
            raise
        sys.stderr.write(f"nanoserve: the system has no more: {error.strerror}\n")
        return 1
    except KeyboardInterrupt:  # before the supervisor has taken the signals over
        return 128 + signal.SIGINT


def _bench_summary(name: str) -> str:
    """The first sentence of the benchmark's docstring, read without importing it: that may take seconds."""
    file = Path(__file__).parent / "bench" / f"{name.replace('-', '_')}.py"
    words = file.read_text(encoding="utf-8").removeprefix('"""').split("\n\n", 1)[0].split('"""')[0]
    words = re.sub(r"^`[^`]+`: |: `python -m [^`]+`", "", " ".join(words.split()))
    return re.split(r"(?<=[.;])\s", words)[0].rstrip(".;")


def bench_command(argv: Sequence[str]) -> int:
    """Runs `nanoserve.bench.NAME` with the remaining arguments; returns the exit code."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        lines = "".join(f"  {name:<12} {_bench_summary(name)}\n" for name in _BENCHMARKS)
        sys.stdout.write(f"usage: nanoserve bench NAME [options]\n\n{lines}\n{_BENCH_END}")
        return 0
    if argv[0] not in _BENCHMARKS:
        sys.stderr.write(f"nanoserve: no benchmark is called {argv[0]!r}; there are {', '.join(_BENCHMARKS)}\n")
        return 1
    sys.argv[:] = [f"nanoserve bench {argv[0]}", *argv[1:]]  # the first is what --help calls the command
    return int(importlib.import_module(f"nanoserve.bench.{argv[0].replace('-', '_')}").main() or 0)


def main(argv: Sequence[str] | None = None) -> int:
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "serve":
        return serve_command(rest)
    if command == "healthcheck":
        from nanoserve.healthcheck import main as healthcheck

        return healthcheck(rest)
    if command == "bench":
        return bench_command(rest)
    if command == "logs":
        from nanoserve.obs.log_view import main as logs

        return logs(rest)
    if command in ("version", "--version"):
        from nanoserve import __version__

        sys.stdout.write(f"{__version__}\n")
        return 0
    if command in ("--help", "-h", "help"):
        sys.stdout.write(_USAGE)
        return 0
    sys.stderr.write(f"nanoserve: unknown command {command!r}\n{_USAGE}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

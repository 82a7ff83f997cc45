"""`python -m nanoserve.healthcheck [--url URL]`: exit code 0 when the server is ready, for containers without curl.

Standard library only, so that it starts in a few hundredths of a second. Without --url it asks the port that
NANOSERVE_PORT names (8000 when unset) on this machine. Addresses are http, https, or http+unix://%2Fpath%2Fto%2Fsocket/ready,
the form that the server prints.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from urllib.parse import SplitResult, unquote, urlsplit


def check(url: str, timeout_s: float) -> tuple[bool, str]:
    """GET `url`; whether it answered 200, and one line that says what it answered."""
    parts = urlsplit(url)
    try:
        connection = _connection(parts, timeout_s)
    except ValueError as error:
        return False, f"{url}: {error}"
    try:
        connection.request("GET", parts.path or "/ready")
        response = connection.getresponse()
        body = response.read(400).decode("utf-8", "replace")
        return response.status == 200, f"{response.status} {' '.join(body.split())}"
    except (OSError, http.client.HTTPException) as error:
        return False, f"{url}: {error}"
    finally:
        connection.close()


def _connection(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """Not connected yet. ValueError for an address of another kind.

    The certificate of this machine's own server is not checked: its name is seldom a loopback address.
    """
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("http", "https") or kind not in ("", "unix") or not parts.hostname:
        raise ValueError("an http://, https://, http+unix:// or https+unix:// address is needed")
    if kind == "unix":
        path = unquote(parts.netloc)  # the case of `hostname` is lost
        return _UnixConnection(path, timeout_s, _unchecked() if scheme == "https" else None)
    if scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    is_loopback = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
    context = _unchecked() if is_loopback else ssl.create_default_context()
    return http.client.HTTPSConnection(parts.hostname, parts.port or 443, timeout=timeout_s, context=context)


def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _UnixConnection(http.client.HTTPConnection):
    """HTTP, or HTTPS with a `context`, over a Unix socket."""

    def __init__(self, path: str, timeout_s: float, context: ssl.SSLContext | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._context = context

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(self.timeout)
        try:
            sock.connect(self._path)
            self.sock = self._context.wrap_socket(sock) if self._context is not None else sock
        except BaseException:
            sock.close()
            raise


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nanoserve healthcheck", description="exit code 0 when the server is ready")
    port = os.environ.get("NANOSERVE_PORT", "8000")
    default = f"http://127.0.0.1:{port if port.isdigit() else '8000'}/ready"
    parser.add_argument("--url", default=default, help=f"what to ask [{default}]")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds to wait for the answer [2]")
    options = parser.parse_args(argv)
    ready, line = check(options.url, options.timeout)
    (sys.stdout if ready else sys.stderr).write(line + "\n")
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())

"""The listening socket: bound by the launcher before anything else happens, inherited by every api process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from nanoserve.config import ApiConfig
from nanoserve.errors import StartupError

_BACKLOG = 4096


def listen_as_told(config: ApiConfig) -> socket.socket:
    """The socket that the configuration asks for: a Unix socket, or host and port."""
    return listen_unix(config.uds) if config.uds else listen(config.host, config.port)


def base_url(config: ApiConfig, sock: socket.socket) -> str:
    """How a client on this machine reaches the server."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds:
        return f"{scheme}+unix://{quote(config.uds, safe='')}"
    host, port = config.host, sock.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{reachable}:{port}"


def listen_unix(path: str) -> socket.socket:
    """Like `listen`, on a path. A socket that a dead server left there is replaced; a live one is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(Path(path)):
            Path(path).unlink()
        sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise StartupError(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock


@contextlib.contextmanager
def listening(config: ApiConfig) -> Iterator[socket.socket]:
    """`listen_as_told`; at the end the socket is closed, and the file of a Unix socket goes if nobody answers there."""
    sock = listen_as_told(config)
    try:
        yield sock
    finally:
        sock.close()
        with contextlib.suppress(OSError):
            if config.uds and _is_left_over(Path(config.uds)):
                Path(config.uds).unlink()


def _is_left_over(path: Path) -> bool:
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != 0


def listen(host: str, port: int) -> socket.socket:
    """Binds and listens; StartupError with one line that names the address when that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise StartupError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from None
    return sock

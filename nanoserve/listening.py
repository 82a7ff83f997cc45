"""The listening socket: bound by the launcher before anything else happens, inherited by every api process."""

from __future__ import annotations

import os
import socket

from nanoserve.errors import StartupError

_BACKLOG = 4096


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

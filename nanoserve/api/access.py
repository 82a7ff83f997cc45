"""Who may call what: api keys, admin keys, and browsers of other origins (CORS).

Owner process: api. Pure but for reading the key file once. Keys are compared in constant time and never logged.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from nanoserve.config import ApiConfig
from nanoserve.errors import RequestError, StartupError

# Probes and scrapes have no keys.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/ping"})
_USUAL_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id"
_HEADER_NAMES = re.compile(r"^[A-Za-z0-9_, -]{1,2000}$")
ADMIN_PATHS = frozenset(
    (
        *("/abort_request", "/flush_cache", "/pause_generation", "/continue_generation"),
        *("/start_profile", "/stop_profile", "/configure_logging"),
    )
)


class Access:
    """The keys of one server."""

    def __init__(self, config: ApiConfig) -> None:
        keys = {key.strip() for key in (*config.api_key, *read_keys(config.api_key_file)) if key.strip()}
        self._keys = [key.encode() for key in sorted(keys)]
        self._admin = [key.encode() for key in config.admin_api_key if key]
        self._origins = frozenset(config.cors_allow_origins)

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """RequestError 401 unless the request carries a key that opens `path`; 403 for pages of other origins."""
        if path in OPEN_PATHS:
            return
        if path in ADMIN_PATHS:
            self._refuse_foreign_page(headers)
        is_admin = path in ADMIN_PATHS and bool(self._admin)
        allowed = self._admin if is_admin else self._keys and [*self._keys, *self._admin]
        if not allowed:
            return
        given = given_key(headers).encode("utf-8", "surrogatepass")
        if not _matches(given, allowed):
            raise RequestError(
                "The API key is missing or wrong.",
                status=401,
                error_type="authentication_error",
                code="invalid_api_key",
            )

    def _refuse_foreign_page(self, headers: Mapping[str, str]) -> None:
        """Browsers let any page post without a body, and only keep the answer from it: acting is what must not be."""
        origin = headers.get("Origin")
        if origin is None or {"*", origin} & self._origins or urlsplit(origin).netloc == headers.get("Host"):
            return
        raise RequestError(
            "Pages of this origin may not act on the server; `--cors-allow-origins` names those that may.",
            status=403,
            error_type="permission_error",
            code="origin_not_allowed",
        )

    def cors_headers(
        self, origin: str | None, *, preflight: bool = False, asked_headers: str | None = None
    ) -> dict[str, str]:
        """Headers that let this origin's browsers read the answer; empty when they may not.

        A preflight's `asked_headers` are granted: client libraries send headers of their own, and keys guard the rest.
        """
        if origin is None or not ({"*", origin} & self._origins):
            return {}
        headers = {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Expose-Headers": "X-Request-Id, X-Nanoserve-Warnings, Retry-After",
            "Vary": "Origin",
        }
        if preflight:
            is_list = asked_headers is not None and _HEADER_NAMES.match(asked_headers)
            headers["Access-Control-Allow-Methods"] = "GET, POST, PUT, OPTIONS"
            headers["Access-Control-Allow-Headers"] = asked_headers if asked_headers and is_list else _USUAL_HEADERS
            headers["Access-Control-Max-Age"] = "600"
        return headers


def given_key(headers: Mapping[str, str]) -> str:
    """The key of `Authorization: Bearer` or `X-Api-Key`; empty without one."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("X-Api-Key", "").strip()


def read_keys(path: str) -> Iterable[str]:
    """One key per line; empty lines and lines that begin with # are skipped."""
    if not path:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the key file: {error}") from error
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _matches(given: bytes, keys: Iterable[bytes]) -> bool:
    """Looks at every key, so that the time tells nothing about which one is near."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(given, key)
    return found

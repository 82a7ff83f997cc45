"""`python -m nanoserve.healthcheck [--url URL]`: exit code 0 when the server is ready, for containers without curl.

Standard library only, so that it starts in a few hundredths of a second. Without --url it asks the port that
NANOSERVE_PORT names (8000 when unset) on this machine.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit


def check(url: str, timeout_s: float) -> tuple[bool, str]:
    """GET `url`; whether it answered 200, and one line that says what it answered."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return False, f"{url}: an http:// address is needed"
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/ready")
        response = connection.getresponse()
        body = response.read(400).decode("utf-8", "replace")
        return response.status == 200, f"{response.status} {' '.join(body.split())}"
    except (OSError, http.client.HTTPException) as error:
        return False, f"{url}: {error}"
    finally:
        connection.close()


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

"""The error envelope of the HTTP surface, the same on every path and in every stream.

Owner process: api. Called by the middleware (`app`), the SSE encoder and the writers of responses.
"""

from __future__ import annotations

from typing import Any

import msgspec

from nanoserve.errors import RequestError
from nanoserve.ipc.messages import Failure

_MAX_MESSAGE_CHARS = 2000
_OVERLOAD = "server_overloaded"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Unavailable(RequestError):
    """The server cannot take this request now; `retry_after_s` goes into the Retry-After header.

    None: whoever answers computes it from the measured rate.
    """

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, status: int = 503, code: str = _OVERLOAD
    ) -> None:
        super().__init__(message, status=status, error_type=_TYPES[status], code=code)
        self.retry_after_s = retry_after_s


def http_error(status: int, message: str) -> RequestError:
    """A RequestError whose type follows from the status."""
    return RequestError(message, status=status, error_type=_TYPES.get(status, "invalid_request_error"))


def from_failure(failure: Failure | None, overload_status: int = 503) -> RequestError:
    """The engine's or detokenizer's words as an error of this request; a full queue has the status that was chosen."""
    if failure is None:
        return http_error(500, "The request failed.")
    if failure.status in (429, 503):
        status = overload_status if failure.code == "queue_full" else failure.status
        return Unavailable(failure.message, status=status, code=failure.code or _OVERLOAD)
    is_ours = failure.status >= 500 and failure.error_type == "invalid_request_error"
    return RequestError(
        failure.message,
        status=failure.status,
        param=failure.param,
        error_type=_TYPES[500] if is_ours else failure.error_type,
        code=failure.code,
    )


def envelope(error: RequestError) -> dict[str, Any]:
    """`code` is the HTTP status as a number; a machine-readable word, where there is one, is `error_code`."""
    body: dict[str, Any] = {
        "message": error.message[:_MAX_MESSAGE_CHARS],
        "type": error.error_type,
        "param": error.param,
        "code": error.status,
    }
    if error.code is not None:
        body["error_code"] = error.code
    return {"error": body}


def messages_envelope(error: RequestError) -> dict[str, Any]:
    """The same words as the Messages protocol frames them, with its own names of what went wrong."""
    body = envelope(error)
    status = error.status
    body["error"]["type"] = _MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", **body}


def envelope_bytes(error: RequestError) -> bytes:
    return msgspec.json.encode(envelope(error))

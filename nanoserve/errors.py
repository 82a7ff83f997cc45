"""Every error nanoserve raises on purpose.

    NanoserveError
    ├── ConfigError          the operator's input is wrong: one line, exit code 1, nothing is loaded
    ├── StartupError         a part could not start (model unreadable, port taken): one line, exit code 1
    ├── ProtocolError        a message that no honest peer sends: counted and dropped by the receiver
    └── RequestError         one request is at fault, or cannot be served now: that request alone ends

Anything else that escapes a process's loop ends that process with a traceback; the supervisor decides what
happens next. Loops do not catch and carry on: a loop that swallows errors serves wrong text quietly.
"""

from __future__ import annotations


class NanoserveError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(NanoserveError):
    """A flag, environment variable or config file is wrong. The message is one line for the operator."""


class StartupError(NanoserveError):
    """A process could not start. The message is one line for the operator."""


class ProtocolError(NanoserveError):
    """A message that cannot be decoded, or whose protocol version differs."""


class RequestError(NanoserveError):
    """One request cannot be served.

    `status` is the HTTP status, `param` names the field at fault, `error_type` and `code` are the words of
    the OpenAI error envelope. The message never repeats the client's input.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        error_type: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.error_type = error_type
        self.code = code

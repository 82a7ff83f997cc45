"""The CPU engine in C++: one call per step over packed bf16 or quantized weights and paged keys and values.

Owner: the engine process. `executor` asks `unsupported_reason` first, and takes `NativeBackend` when it is None;
otherwise the plain torch backend serves. The C++ is compiled at the first start (`build`), in seconds, and cached.
"""

from nanoserve.runner.native.backend import NativeBackend, unsupported_reason
from nanoserve.runner.native.build import NativeUnavailable

__all__ = ["NativeBackend", "NativeUnavailable", "unsupported_reason"]

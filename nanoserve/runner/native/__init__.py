"""The CPU engine in C++: one call per step over packed bf16 or quantized weights and paged keys and values.

Owner: the engine process. `executor` asks `backend.unsupported_reason` first and calls `open.open_native` when it is
None; otherwise the plain torch backend serves. The C++ in csrc/ is compiled by `make setup` or at the first start
(`build`), in seconds, and cached. Read `csrc/step.h` for a step, `csrc/gemm.h` and `csrc/attention.h` for the kernels.
"""

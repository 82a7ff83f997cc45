"""`python -m nanoserve.launch_server --model ...`: the same as `nanoserve serve`."""

from __future__ import annotations

import sys

from nanoserve.__main__ import serve_command

if __name__ == "__main__":
    sys.exit(serve_command(sys.argv[1:], prog="python -m nanoserve.launch_server"))

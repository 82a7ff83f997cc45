"""The api process stays light: neither torch nor transformers nor numpy comes with it."""

from __future__ import annotations

import subprocess
import sys


def test_api_process_imports_nothing_heavy() -> None:
    code = (
        "import sys, nanoserve.api.process\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'numpy', 'pydantic'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == ""

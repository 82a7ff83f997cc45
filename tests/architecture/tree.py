"""docs/tree.md, made from the first sentence of every module's docstring: `make tree` writes it, a test compares it."""

from __future__ import annotations

import ast
import re
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "docs" / "tree.md"
HEAD = "# Every file in one line\n\nMade by `make tree` from the modules' docstrings.\n"


def _summary(path: Path) -> str:
    """The docstring's first sentence, without its command and without what follows a colon."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(docstring.split("\n\n")[0].split())
    first = re.sub(r"^`(python -m|nanoserve) [^`]*`: ", "", first)
    return re.split(r"(?<=[.;])\s", first)[0].rstrip(".;")


def render() -> str:
    files = sorted((ROOT / "nanoserve").rglob("*.py"), key=lambda path: (path.parent, path.name))
    parts = [HEAD]
    for folder, members in groupby(files, key=lambda path: path.parent):
        rows = [f"| `{path.name}` | {_summary(path)} |" for path in members if _summary(path)]
        if rows:
            parts.append(f"\n## {folder.relative_to(ROOT)}/\n\n| file | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    TREE.write_text(render())
    sys.exit(0)

"""The package's own source, parsed once for all architecture tests."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nanoserve"


@dataclass(frozen=True)
class Module:
    path: Path  # relative to the repository
    name: str  # nanoserve.api.process
    tree: ast.Module
    text: str

    @property
    def layer(self) -> str:
        """The package under nanoserve, or the module's own name at the top."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "nanoserve"

    def imports(self) -> set[str]:
        """Full names of all modules imported anywhere in the file, inside functions too."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: relative import"
                found.add(node.module or "")
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(ROOT), name, ast.parse(text), text))
    return tuple(found)

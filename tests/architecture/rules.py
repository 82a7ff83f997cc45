"""docs/rules.md: which tests guard each rule. `make tree` writes its last column from the markers; a test compares it.

A test says what it guards by `@pytest.mark.rule(8, 12)`, or by `@pytest.mark.case(7)` for the small inputs with known
answers. The words of the rules are written by hand; only the last cell of each row is made here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "docs" / "rules.md"
_ROW = re.compile(r"\| ([RC])(\d\d) \| (.+?) \|(?: (.*) \|)?")
_KINDS = {"rule": "R", "case": "C"}

Names = dict[str, list[tuple[str, str]]]  # R08 -> (file, test) ...


@cache
def marked() -> Names:
    """All tests by the rules and cases that their markers name, in the order of the files."""
    found: Names = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").as_posix().removesuffix(".py").replace("/test_", "/")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for key in _keys(node):
                    found[key].append((name, node.name.removeprefix("test_")))
    return found


def _keys(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """What the `rule` and `case` markers of one test say."""
    keys = []
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr in _KINDS:
            for number in mark.args:
                assert isinstance(number, ast.Constant) and isinstance(number.value, int), (
                    f"{test.name}: a plain number"
                )
                keys.append(f"{_KINDS[mark.func.attr]}{number.value:02d}")
    return keys


def rules() -> dict[str, str]:
    """Every rule and case of docs/rules.md with its words."""
    rows = [_ROW.fullmatch(line) for line in RULES.read_text(encoding="utf-8").splitlines()]
    return {row[1] + row[2]: row[3] for row in rows if row}


def render() -> str:
    """docs/rules.md with the last column as the markers say."""
    found = marked()
    lines = []
    for line in RULES.read_text(encoding="utf-8").splitlines():
        if row := _ROW.fullmatch(line):
            key = row[1] + row[2]
            line = f"| {key} | {row[3]} | {_cell(found.get(key, []))} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _cell(tests: list[tuple[str, str]]) -> str:
    by_file: dict[str, list[str]] = defaultdict(list)
    for file, test in tests:
        by_file[file].append(test)
    return "<br>".join(f"`{file}`: {', '.join(sorted(names))}" for file, names in by_file.items())


if __name__ == "__main__":
    RULES.write_text(render(), encoding="utf-8")

"""Sizes at which code stops being readable. The allow-lists are short and say why; growing one needs a reason."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import ROOT, Module, modules

FILE_LINES = 400
FUNCTION_LINES = 60
SELF_ATTRIBUTES = 15
METHODS = 20
OWN_IMPORTS = 15

LONG_FILES = {
    "nanoserve/ipc/messages.py": 520,  # the whole protocol is one module, by rule
}
BIG_CLASSES = {
    "RequestStream": (20, METHODS),  # the record of one request: a list of plain fields
    "Scheduler": (SELF_ATTRIBUTES, 24),  # many small private methods, few attributes
}
# Where a whole process is built from its parts.
WIRING = dict.fromkeys(
    (f"nanoserve/{name}.py" for name in ("api/process", "engine/process", "runner/executor", "supervisor")), 20
)


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_files_and_functions_are_short(module: Module) -> None:
    assert len(module.text.splitlines()) <= LONG_FILES.get(str(module.path), FILE_LINES)
    for function in functions(module):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= FUNCTION_LINES, f"{module.path}: {function.name} has {length} lines"


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_classes_are_small(module: Module) -> None:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        attributes = {
            part.attr
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        }
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        most_attributes, most_methods = BIG_CLASSES.get(node.name, (SELF_ATTRIBUTES, METHODS))
        assert len(attributes) <= most_attributes, f"{module.path}: {node.name} has {len(attributes)} attributes"
        assert len(methods) <= most_methods, f"{module.path}: {node.name} has {len(methods)} methods"


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_modules_know_few_others(module: Module) -> None:
    own = {
        node.module
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoserve")
    }
    assert len(own) <= WIRING.get(str(module.path), OWN_IMPORTS), f"{module.path} imports {len(own)} of our modules"


@pytest.mark.parametrize("module", [m for m in modules() if m.text.strip()], ids=lambda m: m.name)
def test_every_module_says_what_it_is_for(module: Module) -> None:
    assert ast.get_docstring(module.tree)


def test_the_allow_lists_name_existing_code() -> None:
    names = {node.name for m in modules() for node in ast.walk(m.tree) if isinstance(node, ast.ClassDef)}
    assert set(BIG_CLASSES) <= names
    assert all((ROOT / path).exists() for path in [*LONG_FILES, *WIRING])

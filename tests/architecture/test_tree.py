"""docs/tree.md names every file that there is, and says of it what its docstring says."""

from __future__ import annotations

from tests.architecture.tree import TREE, render


def test_the_tree_is_up_to_date() -> None:
    assert TREE.read_text() == render(), "run `make tree`"

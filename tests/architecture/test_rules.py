"""docs/rules.md and the tests agree: each rule has a test that names it, no test names a rule that is not there."""

from __future__ import annotations

from tests.architecture.rules import RULES, marked, render, rules


def test_every_rule_has_a_test_that_names_it() -> None:
    assert not sorted(rules().keys() - marked().keys()), "without a test"


def test_no_test_names_an_unknown_rule() -> None:
    assert not sorted(marked().keys() - rules().keys()), "not in docs/rules.md"


def test_numbers_have_no_holes() -> None:
    for kind in "RC":
        numbers = [int(key[1:]) for key in rules() if key[0] == kind]
        assert numbers == list(range(1, len(numbers) + 1))


def test_the_column_of_tests_is_up_to_date() -> None:
    assert RULES.read_text(encoding="utf-8") == render(), "run `make tree`"

"""A jinja sandbox in which no template runs for ever, or makes a text without bounds.

Owner process: api; used by `chat_template` alone. A thread that renders cannot be stopped from outside, so the template
itself counts: every turn of a loop and every call is a step, and what makes much of little (`*`, `**`, `+`, `~`) is
looked at first. Beyond the bounds rendering ends with a TemplateRuntimeError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000  # a second of work for a loop that writes, four for calls of macros
MAX_SIZE = 64 << 20  # characters or elements of one value
_MAX_BITS = 4096  # of a power
_TURNS, _JOINED = "_nanoserve_turns", "_nanoserve_joined"


class _Steps(threading.local):
    left = 0


class _Counting(NodeTransformer):
    """Loops go over counted iterables; `~`, for which the sandbox has no hook, becomes a filter."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, _TURNS)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter(jinja2.nodes.List(node.nodes, lineno=node.lineno), _JOINED)


def _filter(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    assert isinstance(node, jinja2.nodes.Expr)  # what a loop goes over
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Immutable sandbox, trimmed blocks. `begin` gives the calling thread a fresh number of steps."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, extensions: Iterable[type[jinja2.ext.Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=list(extensions))
        self._steps = _Steps()
        # filters that take the context are never evaluated when the template is compiled
        self.filters[_TURNS] = jinja2.pass_context(lambda _, iterable: self._turns(iterable))
        self.filters[_JOINED] = jinja2.pass_context(lambda _, parts: _joined(parts))

    def begin(self) -> None:
        self._steps.left = MAX_STEPS

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._take(1)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, Sized) and isinstance(times, int):
                    _check_size(len(many) * times)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
        elif operator == "**" and _num_bits(left, right) > _MAX_BITS:
            raise jinja2.TemplateRuntimeError("a number grows too large")
        return super().call_binop(context, operator, left, right)

    def _take(self, count: int) -> None:
        self._steps.left -= count
        if self._steps.left < 0:
            raise jinja2.TemplateRuntimeError("it takes too many steps")

    def _turns(self, iterable: Any) -> Any:
        """The iterable itself where its length is the number of turns, else one that counts them."""
        if isinstance(iterable, Sized):
            self._take(len(iterable))
            return iterable
        return self._each(iterable)

    def _each(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._take(1)
            yield item


def _num_bits(base: Any, exponent: Any) -> int:
    """About how long a power of whole numbers is; others have a fixed size."""
    return base.bit_length() * exponent if isinstance(base, int) and isinstance(exponent, int) else 0


def _joined(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise jinja2.TemplateRuntimeError("a text grows too long")

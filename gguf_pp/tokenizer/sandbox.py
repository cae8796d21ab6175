"""A Jinja environment for sources that nobody vouches for: no reach, bounded time and size."""

import json
import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 16 << 20
MAX_SECONDS = 5.0
_MAX_SOURCE_CHARS = 1 << 20
_MAX_INT_BITS = 4096
_HUGE_WIDTH = re.compile("[0-9]{7}")
_SIZING_FILTERS = frozenset(("batch", "center", "format", "indent", "slice", "wordwrap"))

deadline: ContextVar[float] = ContextVar("deadline")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the clock at every loop step and call, and the size of what can grow.

    Sizes are checked where an operator or a call makes a value, and where a value gets a name. A
    check that fails raises SecurityError.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        self.filters["tojson"] = to_json
        self.filters["bounded"] = bounded
        del self.globals["lipsum"]

    def bounded_template(self, source: str) -> jinja2.Template:
        """Compile `source`, with the checks that Jinja has no hook for written into it."""
        if len(source) > _MAX_SOURCE_CHARS:
            raise SecurityError(f"the source is longer than {_MAX_SOURCE_CHARS} characters")
        tree = _Checks().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def tick(self) -> str:
        """Check the clock; `call` has done it."""
        return ""

    def join_texts(self, *parts: object) -> str:
        """Do what `~` does."""
        texts = list(map(str, parts))
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def bounded(self, value: object) -> object:
        """Return `value`; `call` has checked its size."""
        return value

    def bounded_width(self, value: object) -> object:
        """Return `value`, an argument that says how long a text or a list becomes."""
        _check_width(value)
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj` from a template."""
        _check_time()
        for value in (*args, *kwargs.values()):
            bounded(value)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        if isinstance(text := getattr(method, "__self__", None), str):
            for value in (text if method.__name__.startswith("format") else "", *args):
                _check_width(value)
        return bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`."""
        if operator == "%" and isinstance(left, str):
            for value in (left, *(right if isinstance(right, tuple) else (right,))):
                _check_width(value)
        elif isinstance(left, int) and isinstance(right, int):
            _check_int(operator, left, right)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(times, int):
                    _check_size(len(value) * times)
        return super().call_binop(context, operator, left, right)


class Generation(Extension):
    """{% generation %}: marks what the model said, for training; here it changes nothing."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, without the HTML escapes of Jinja's own filter."""
    _check_width(indent)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    chunks: list[str] = []
    n_chars = 0
    for chunk in encoder.iterencode(value):
        n_chars += len(chunk)
        _check_size(n_chars)
        _check_time()
        chunks.append(chunk)
    return "".join(chunks)


def bounded(value: object) -> object:
    """Return `value`. Raises SecurityError if it is too long, counting what is inside it.

    A list that is twice in another counts twice, as it does when written out.
    """
    size = 0
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, (str, list, tuple, dict)):
            size += len(item)
            _check_size(size)
            if not isinstance(item, str):
                rest.extend(item.values() if isinstance(item, dict) else item)
    return value


def _check_time() -> None:
    if time.monotonic() > deadline.get():
        raise SecurityError(f"rendering takes longer than {MAX_SECONDS:g} s")


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"a value grows beyond {MAX_CHARS} characters or items")


def _check_width(value: object) -> None:
    if isinstance(value, str) and _HUGE_WIDTH.search(value):
        raise SecurityError("a text to be formatted asks for a width of seven digits or more")
    if isinstance(value, int):
        _check_size(abs(value))


def _check_int(operator: str, left: int, right: int) -> None:
    if operator == "*":
        n_bits = left.bit_length() + right.bit_length()
    else:
        n_bits = left.bit_length() * abs(right) if operator == "**" else 0
    if n_bits > _MAX_INT_BITS:
        raise SecurityError(f"a number grows beyond {_MAX_INT_BITS} bits")


class _Checks(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.ExprStmt(_checked("tick", [], node), lineno=node.lineno)
        node.body.insert(0, tick)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _checked("join_texts", node.nodes, node)

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:
        self.generic_visit(node)
        node.node = _checked("bounded", [node.node], node)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        self.generic_visit(node)
        if node.name in _SIZING_FILTERS:
            node.args = [_checked("bounded_width", [arg], node) for arg in node.args]
            for pair in node.kwargs:
                pair.value = _checked("bounded_width", [pair.value], node)
        return node


def _checked(name: str, args: Sequence[nodes.Node], node: nodes.Node) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=node.lineno)
    return nodes.Call(method, list(args), [], None, None, lineno=node.lineno)

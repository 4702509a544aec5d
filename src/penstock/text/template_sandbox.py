"""The sandbox of chat templates: what a template may use, and how far it may go.

It keeps a template from this process and from changing its input. Bounded besides:

- the rendered text, and every string or list that an operator, a filter or a call makes:
  `max_chars`, and in bytes what the caller has room for (`PromptTooLarge`),
- work: `max_cpu_s` of the thread's own time, checked at each loop step, call and piece of output,
- widths and counts given to filters and to the methods of strings, and the bits of a computed
  number: 100,000, as is `range()`.

So neither an endless loop nor growth by repetition gets far.
"""

from __future__ import annotations

import json
import math
import re
import time
from datetime import datetime
from functools import wraps
from threading import local
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from jinja2.compiler import Frame
    from jinja2.parser import Parser
    from jinja2.runtime import Context


class PromptTooLarge(Exception):  # noqa: N818 - whoever has more room may try again
    """There is more text than the caller has room for."""


class Bounds:
    """How far a template may go."""

    def __init__(self, *, max_chars: int = 64 << 20, max_cpu_s: float = 10.0) -> None:
        self.max_chars = max_chars
        self.max_cpu_s = max_cpu_s


class RefusedError(TemplateError):
    """The template called `raise_exception`."""


class Meter(local):
    """What the rendering in the present thread has used."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._deadline = 0.0
        self._chars = self._bytes = 0
        self._max_bytes = math.inf

    def start(self, max_bytes: int | None) -> None:
        self._deadline = time.thread_time() + self._bounds.max_cpu_s
        self._chars = self._bytes = 0
        self._max_bytes = math.inf if max_bytes is None else max_bytes

    def check(self) -> None:
        if time.thread_time() > self._deadline:
            raise SecurityError(f"it took more than {self._bounds.max_cpu_s:g} s of computing.")

    def add_output(self, piece: str) -> None:
        self._chars += len(piece)
        self._bytes += _bytes(piece)
        self.require_size(self._chars)
        self.require_bytes(self._bytes)

    def require_bytes(self, size: int) -> None:
        if size > self._max_bytes:
            raise PromptTooLarge

    def require_size(self, size: int) -> None:
        if size > self._bounds.max_chars:
            raise SecurityError(f"it made more than {self._bounds.max_chars:,} characters.")

    def allowed(self, made: Any) -> Any:
        """The same, unless it is too large."""
        if isinstance(made, (str, list, tuple)):
            self.require_size(len(made))
            self.require_bytes(_bytes(made))
        return made

    def require_small(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > MAX_RANGE:
                raise SecurityError(f"the number {argument:.3g} is over {MAX_RANGE:,}.")

    def steps(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.check()
            yield item

    def joined(self, parts: Iterable[Any]) -> str:
        texts = [str(part) for part in parts]
        self.require_size(sum(map(len, texts)))
        self.require_bytes(sum(map(_bytes, texts)))
        return "".join(texts)


class _Metering(NodeTransformer):
    """Sends loops and `~` past the meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        node.iter = _filtered("metered_steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("metered_joined", nodes.List(node.nodes, lineno=node.lineno))


class _MeteredCode(CodeGenerator):
    """Jinja's compiler, behind `_Metering`."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        metered = _Metering().visit(node).set_environment(self.environment)
        super().visit_Template(metered, frame)


def _filtered(name: str, value: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only groups them."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class Environment(ImmutableSandboxedEnvironment):
    """What the templates of Hugging Face models expect, and the bounds."""

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, bounds: Bounds) -> None:
        self.meter = Meter(bounds)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.filters["tojson"] = _to_json
        for name, made in self.filters.items():
            self.filters[name] = self._metered(made, sized=name in _SIZED_FILTERS)
        self.filters["metered_steps"] = self.meter.steps
        self.filters["metered_joined"] = self.meter.joined
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now

    def _metered(self, function: Callable[..., Any], *, sized: bool) -> Callable[..., Any]:
        @wraps(function)  # keeps jinja's marks, which say what it passes first
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.check()
            if sized:
                self.meter.require_small((*args[1:], *kwargs.values()))
                _require_short_widths(args[0])
            if function.__name__ in _MULTIPLYING:  # they are passed a context first
                self.meter.require_bytes(_multiplied(function.__name__, args[1], args[2:]))
            return self.meter.allowed(function(*args, **kwargs))

        return metered

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.check()
        # The methods of a string are where a width or a count can make text; macros and the
        # methods of other values may be given any number.
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
        if isinstance(owner := getattr(method, "__self__", None), str):
            self.meter.require_small((*args, *kwargs.values()))
            if method.__name__ in ("format", "format_map"):
                _require_short_widths(owner)
            if method.__name__ in ("join", "replace"):
                self.meter.require_bytes(_multiplied(method.__name__, owner, args))
        return self.meter.allowed(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.check()
        if isinstance(left, int) and isinstance(right, int):
            _require_short_result(operator, left, right)
        elif operator == "+":
            self.meter.require_size(_size(left) + _size(right))
            self.meter.require_bytes(_bytes(left) + _bytes(right))
        elif operator == "*":
            times = _times(left, right)
            self.meter.require_size(max(_size(left), _size(right)) * times)
            self.meter.require_bytes(max(_bytes(left), _bytes(right)) * times)
        elif operator == "%":
            _require_short_widths(left)
        return super().call_binop(context, operator, left, right)


# Filters that take a width or a count and make text or lists of that size.
_SIZED_FILTERS = frozenset(
    {"batch", "center", "format", "indent", "round", "slice", "tojson", "wordwrap"}
)
# Filters that make more of a text than they are given.
_MULTIPLYING = frozenset({"do_join", "do_replace"})
_LONG_WIDTH = re.compile(r"[0-9]{6}|\*")


def _require_short_widths(layout: Any) -> None:
    """Refuses `"%999999d"` and its like."""
    if isinstance(layout, str) and ("%" in layout or "{" in layout) and _LONG_WIDTH.search(layout):
        raise SecurityError("a format has a width over 99,999 or a width given as '*'.")


def _require_short_result(operator: str, left: int, right: int) -> None:
    """Refuses whole numbers so long that computing them is work."""
    bits = _bits(left) * abs(right) if operator == "**" else _bits(left) + _bits(right)
    if bits > MAX_RANGE:
        raise SecurityError(f"a number would have over {MAX_RANGE:,} bits.")


def _bits(number: int) -> int:
    return number.bit_length()


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _multiplied(name: str, text: Any, args: Sequence[Any]) -> int:
    """What joining or replacing makes at most; `text.join(list)` is `list | join`."""
    if name == "do_join":
        text, args = next(iter(args), ""), (text,)
    if name in ("join", "do_join"):
        parts = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        return sum(map(_bytes, parts)) + _size(text) * len(parts)
    if len(args) < 2 or not all(isinstance(one, str) for one in (text, *args[:2])):
        return 0
    times: int = text.count(args[0])
    return _bytes(text) + times * len(args[1])


def _bytes(value: Any) -> int:
    """That a text or a list takes by itself."""
    return value.__sizeof__() if isinstance(value, (str, list, tuple)) else 0


def _times(left: Any, right: Any) -> int:
    """How often the other operand is repeated; 0 when this is no repetition."""
    return next((value for value in (left, right) if isinstance(value, int)), 0)


def _refuse(message: Any = "") -> None:
    raise RefusedError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's own filter: that one escapes <, > and & for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

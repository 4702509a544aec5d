"""A model's chat template: messages in, the prompt's text out, in a sandbox with bounds.

A template is a program written by the model's publisher and run on a client's messages. The
sandbox keeps it from this process and from changing its input. Bounded besides:

- the rendered text, and every string or list made by `+`, `*` or `~`: `max_chars`,
- work: `max_cpu_s` of the thread's own time, checked at each loop step, call and piece of output,
- widths and counts given to filters and to the methods of strings, and the bits of a computed
  number: 100,000, as is `range()`.

So neither an endless loop nor growth by repetition gets far. Rendering is work for a thread.
This module knows nothing of requests, and not what the messages of a given protocol look like.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from functools import wraps
from threading import local
from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.errors import BadRequest, ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from jinja2.compiler import Frame
    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from penstock.text.tokenizer import Tokenizer

# What a template may raise on messages it was not written for, besides jinja's own errors.
_RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
)


# Behind a message that is to be continued: shows where its content ends, and by its blank whether
# the template trims.
_END_MARK = "<<the answer goes on from here>> "


class ChatTemplate:
    """Renders conversations. Safe to use from several threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        extra: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """`extra` holds further names, such as `pad_token`; `tool_source` serves chats with tools.

        `ModelUnusable` when a source is no valid template.
        """
        self._environment = _Environment(bounds or Bounds())
        self._names = {**(extra or {}), "bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            self._plain = self._environment.from_string(source)
            self._with_tools = self._environment.from_string(tool_source or source)
        except TemplateSyntaxError as error:
            raise ModelUnusable(
                f"The model's chat template cannot be read: {error.message} (line {error.lineno})."
            ) from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self | None:
        """The template that came with a model, or None when it has none."""
        source = tokenizer.chat_template
        if source is None:
            return None
        return cls(
            source,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            extra=tokenizer.special_tokens,
            tool_source=tokenizer.chat_templates.get("tool_use"),
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text; blocking. `arguments` are further names the template may look at.

        With `continue_final_message` it ends where the last message's content does. `BadRequest`
        when the template refuses the messages or cannot render them.
        """
        if continue_final_message:
            return self._unfinished(messages, tools, arguments)
        ours: dict[str, Any] = {
            **self._names,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if taken := sorted((ours.keys() - {"documents"}) & (arguments or {}).keys()):
            raise BadRequest(
                f"The chat template's argument {taken[0]!r} is set by the server and cannot be "
                "given by a request.",
                param="chat_template_kwargs",
            )
        template = self._with_tools if tools else self._plain
        meter = self._environment.meter
        meter.start()
        pieces = []
        try:
            for piece in template.generate({**ours, **(arguments or {})}):
                meter.check()
                meter.add_output(len(piece))
                pieces.append(piece)
        except _RefusedError as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {error.message}",
                param="messages",
            ) from error
        except _RENDER_ERRORS as error:
            raise BadRequest(
                f"The model's chat template cannot render these messages: {_sentence(error)}",
                param="messages",
            ) from error
        return "".join(pieces)

    def _unfinished(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any] | None,
    ) -> str:
        """Up to the end of the last message's content, which a mark behind it shows."""
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise BadRequest("The message to be continued has no text.", param="messages")
        marked = {**messages[-1], "content": content + _END_MARK}
        text = self.render(
            [*messages[:-1], marked],
            add_generation_prompt=False,
            tools=tools,
            arguments=arguments,
        )
        before, mark, behind = text.rpartition(_END_MARK.strip())
        if not mark:
            raise BadRequest(
                "The model's chat template does not show the last message, so it cannot be "
                "continued.",
                param="messages",
            )
        # A template that trims its messages would have trimmed this one's end too.
        return before if behind.startswith(" ") else before.rstrip()


def _sentence(error: BaseException) -> str:
    return str(error) or type(error).__name__


class Bounds:
    """How far a template may go."""

    def __init__(self, *, max_chars: int = 64 << 20, max_cpu_s: float = 10.0) -> None:
        self.max_chars = max_chars
        self.max_cpu_s = max_cpu_s


class _RefusedError(TemplateError):
    """The template called `raise_exception`."""


class _Meter(local):
    """What the rendering in the present thread has used."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._deadline = 0.0
        self._chars = 0

    def start(self) -> None:
        self._deadline = time.thread_time() + self._bounds.max_cpu_s
        self._chars = 0

    def check(self) -> None:
        if time.thread_time() > self._deadline:
            raise SecurityError(f"it took more than {self._bounds.max_cpu_s:g} s of computing.")

    def add_output(self, chars: int) -> None:
        self._chars += chars
        self.require_size(self._chars)

    def require_size(self, size: int) -> None:
        if size > self._bounds.max_chars:
            raise SecurityError(f"it made more than {self._bounds.max_chars:,} characters.")

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


class _Environment(ImmutableSandboxedEnvironment):
    """What the templates of Hugging Face models expect, and the bounds."""

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, bounds: Bounds) -> None:
        self.meter = _Meter(bounds)
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
            return function(*args, **kwargs)

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
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.check()
        if isinstance(left, int) and isinstance(right, int):
            _require_short_result(operator, left, right)
        elif operator == "+":
            self.meter.require_size(_size(left) + _size(right))
        elif operator == "*":
            self.meter.require_size(max(_size(left), _size(right)) * _times(left, right))
        elif operator == "%":
            _require_short_widths(left)
        return super().call_binop(context, operator, left, right)


# Filters that take a width or a count and make text or lists of that size.
_SIZED_FILTERS = frozenset(
    {"batch", "center", "format", "indent", "round", "slice", "tojson", "wordwrap"}
)
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


def _times(left: Any, right: Any) -> int:
    """How often the other operand is repeated; 0 when this is no repetition."""
    return next((value for value in (left, right) if isinstance(value, int)), 0)


def _refuse(message: Any = "") -> None:
    raise _RefusedError(str(message))


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

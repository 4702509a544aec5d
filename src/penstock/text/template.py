"""A model's chat template: messages in, the prompt's text out.

A template is a program written by the model's publisher and run on a client's messages, in a
sandbox with bounds (`template_sandbox`). Rendering is work for a thread. This module knows nothing
of requests, and not what the messages of a given protocol look like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateError, TemplateSyntaxError

from penstock.errors import BadRequest, ModelUnusable, shortened
from penstock.text.template_sandbox import Bounds, Environment, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Template

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
        self._environment = Environment(bounds or Bounds())
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
        max_bytes: int | None = None,
    ) -> str:
        """The prompt's text; blocking. `arguments` are further names the template may look at.

        With `continue_final_message` it ends where the last message's content does. `BadRequest`
        when the template refuses the messages or cannot render them. The text takes `max_bytes` at
        most, and about as much again, and again, while it is made; otherwise `PromptTooLarge`.
        """
        if continue_final_message:
            return self._unfinished(messages, tools, arguments, max_bytes)
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
        return self._text(template, {**ours, **(arguments or {})}, max_bytes)

    def _text(self, template: Template, names: dict[str, Any], max_bytes: int | None) -> str:
        meter = self._environment.meter
        meter.start(max_bytes)
        pieces = []
        try:
            for piece in template.generate(names):
                meter.check()
                meter.add_output(piece)
                pieces.append(piece)
        except RefusedError as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {_sentence(error)}",
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
        max_bytes: int | None,
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
            max_bytes=max_bytes,
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
    return shortened(str(error), 400) or type(error).__name__

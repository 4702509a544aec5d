"""How one model converses: how it is shown tools, how it thinks, how it writes calls.

Chosen once per model from its chat template and vocabulary. Given what a conversation asks for it
says what the template is to be given, how the answer's text is read and by which grammar it is
held. Knows no protocol.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock import wire
from penstock.errors import BadRequest
from penstock.text.grammars import grammar as grammars
from penstock.text.grammars.grammar import Format, Grammar, GrammarSource, literal
from penstock.text.parsing import plain
from penstock.text.parts import CallBegin, ReasoningDelta, TextDelta
from penstock.text.reasoning import Tags, read_reasoning, tags_of
from penstock.text.tools import by_name, chosen_for
from penstock.text.tools.dialect import MAX_CALLS, Marks, Tool
from penstock.text.tools.harmony import CHANNEL as HARMONY_CHANNEL
from penstock.text.tools.harmony import END, MESSAGE, Harmony
from penstock.text.tools.harmony import START as HARMONY_START
from penstock.text.tools.hermes import Hermes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.text.grammars.json_form import Style
    from penstock.text.parsing import Parse, Source
    from penstock.text.tokenizer import Tokenizer
    from penstock.text.tools.dialect import CallRule, Dialect


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how free the model is to call them."""

    tools: tuple[Tool, ...] = ()
    required: bool = False
    name: str | None = None  # the one that must be called
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        return tuple(tool for tool in self.tools if self.name in (None, tool.name))

    @property
    def most(self) -> int:
        """Calls in one answer."""
        return MAX_CALLS if self.parallel and self.name is None else 1


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the client wants of the model's reasoning; None leaves it to the model."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None  # tokens, hard

    def __post_init__(self) -> None:
        if self.effort == "none" and self.enabled is None:
            object.__setattr__(self, "enabled", False)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How an answer is constrained while it is generated, and how its text is parsed."""

    parser: Callable[[Source], Parse[None]] = plain
    visible: frozenset[str] = frozenset()  # special tokens that the parser has to see
    grammar: GrammarSource | None = None
    thinking: wire.Thinking | None = None


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One model's way to converse."""

    tokenizer: Tokenizer
    template: str
    dialect: Dialect = field(default_factory=Hermes)
    tags: Tags | None = None
    shows_tools: bool = True  # the template does; else the system message has to

    @classmethod
    def of(cls, tokenizer: Tokenizer, dialect: str | None = None) -> ChatFormat | None:
        """The manner of a model; None when it has no chat template. `dialect` overrides."""
        template = tokenizer.chat_templates.get("tool_use") or tokenizer.chat_template
        if template is None:
            return None
        chosen = chosen_for(template)
        if dialect is not None:
            chosen = by_name(dialect)
        tags = None if isinstance(chosen, Harmony) else tags_of(template, tokenizer)
        return cls(tokenizer, template, chosen or Hermes(), tags, "tools" in template)

    @property
    def thinks(self) -> bool:
        """Whether the model reasons before it answers."""
        return self.tags is not None or isinstance(self.dialect, Harmony)

    # --- what the template is given ------------------------------------------------------------

    def shown_tools(self, use: ToolUse) -> list[dict[str, Any]] | None:
        """The tools for the template."""
        if not use.tools or not self.shows_tools:
            return None
        return [tool.definition for tool in use.tools]

    def messages(self, messages: list[dict[str, Any]], use: ToolUse) -> list[dict[str, Any]]:
        """The messages for the template: tools and calls in words where it cannot show them."""
        if self.shows_tools:
            return messages
        told = [_in_words(message) for message in messages]
        if not use.tools:
            return told
        instructions = _instructions(use)
        if told and told[0]["role"] == "system":
            first = {**told[0], "content": f"{told[0]['content']}\n\n{instructions}"}
            return [first, *told[1:]]
        return [{"role": "system", "content": instructions}, *told]

    def arguments(self, thinking: Thinking) -> dict[str, Any]:
        """What a template may look at to switch reasoning."""
        arguments: dict[str, Any] = {}
        if thinking.enabled is not None:
            arguments |= {"enable_thinking": thinking.enabled, "thinking": thinking.enabled}
        if thinking.effort not in (None, "none"):
            arguments["reasoning_effort"] = thinking.effort
        return arguments

    # --- the answer ----------------------------------------------------------------------------

    def answer(
        self,
        prompt: str,
        use: ToolUse,
        wanted: Format | None,
        thinking: Thinking,
        *,
        style: Style = "compact",
        loose: Collection[str] = (),
    ) -> OutputSpec:
        """How the answer is held to its form, and read; `style` is that of JSON in it, and `loose`
        are tools that may be called with any arguments, unless they are strict."""
        tools, dialect, tags = use.tools, self.dialect, self.tags
        opened = tags is not None and tags.opened_by(prompt)
        harmony = isinstance(dialect, Harmony)

        def parser(source: Source) -> Parse[None]:
            if tags is not None:
                yield from read_reasoning(source, tags, opened=opened)
            if tools or harmony:
                yield from _tidy(dialect.parse(source, tools))
            else:
                yield from plain(source)

        visible = set(dialect.visible if tools or harmony else ())
        if tags is not None:
            visible |= {tags.open.strip(), tags.close, tags.open.partition("thought")[0]}
        grammar = self._grammar(use, wanted, style, loose)
        thinks = self._thinking(opened, thinking, grammar is not None)
        if grammar is not None and tags is not None and thinks is None:
            # The end of thinking is no token of its own: it is found in the text.
            grammar.rules.append(f"thought[lazy]: /(?s:.*)/ {literal(tags.close)}")
            grammar.start = f"thought{'' if opened else '?'} ({grammar.start})"
        param = "tools" if wanted is None else wanted.param
        source = None if grammar is None else GrammarSource(grammar.text(param))
        simple = not tools and tags is None and not harmony
        return OutputSpec(plain if simple else parser, frozenset(visible), source, thinks)

    def _grammar(
        self, use: ToolUse, wanted: Format | None, style: Style, loose: Collection[str]
    ) -> Grammar | None:
        """What the answer must be, as far as it is not free."""
        grammar = Grammar(style=style)
        marks = Marks(self._special)
        answers: list[str] = []
        if wanted is not None:
            body = grammars.body_of(grammar, wanted)
            answers.append(self._as_answer(body, marks))
        if not use.tools:
            grammar.start = " | ".join(answers)
            return grammar if answers else None
        tools = [tool.loosened() if tool.name in loose else tool for tool in use.callable]
        rule = self.dialect.calls(grammar, tools, use.most, marks, self.template)
        grammar.rule("calls", f"{marks(rule.trigger)} {rule.after}")
        if use.required:
            grammar.start = "calls"
        elif answers:
            grammar.start = f"calls | {answers[0]}"
        elif rule.trigger and self._holds_auto(use, rule, marks):
            self._auto(grammar, rule, marks, use)
        else:
            return None
        if isinstance(self.dialect, Harmony) and use.required:
            grammar.start = f"{self._harmony_start(marks)} {grammar.start}"
        return grammar

    def _holds_auto(self, use: ToolUse, rule: CallRule, marks: Marks) -> bool:
        """Whether a call that the model begins of its own accord is held to its form.

        Always where a token begins it, which no text can contain; else only if asked for, since
        the same letters may be part of an ordinary answer.
        """
        if isinstance(self.dialect, Harmony):
            return False
        strict = any(tool.strict for tool in use.tools)
        return marks.is_special(rule.trigger) or strict or not use.parallel

    def _auto(self, grammar: Grammar, rule: CallRule, marks: Marks, use: ToolUse) -> None:
        grammar.rules.append("TEXT: /(?s:.*)/")
        if marks.is_special(rule.trigger):
            head = f"TEXT {marks(rule.trigger)}"
        else:
            head = grammar.rule("head[lazy]", f"TEXT {literal(rule.trigger)}")
        call = grammar.rule("turn", f"{head} {rule.after}")
        # A call that may not be followed by another is the end of the answer.
        grammar.start = f"{call}* TEXT" if use.parallel else f"{call} | TEXT"

    def _as_answer(self, body: str, marks: Marks) -> str:
        if not isinstance(self.dialect, Harmony):
            return body
        return f"{self._harmony_start(marks)} {marks(HARMONY_CHANNEL, 'final', MESSAGE)} {body}"

    def _harmony_start(self, marks: Marks) -> str:
        """What stands between the end of the analysis and the next channel."""
        return f"({marks(HARMONY_START, 'assistant')})?"

    def _thinking(
        self, opened: bool, thinking: Thinking, constrained: bool
    ) -> wire.Thinking | None:
        """What the worker has to know of the reasoning: only where something depends on it."""
        budget = 0 if thinking.enabled is False else thinking.budget
        if budget is None and not constrained:
            return None
        if isinstance(self.dialect, Harmony):
            end, start = self._special(END), self._special(HARMONY_CHANNEL)
            if end is None or start is None:
                return None
            return wire.Thinking([end], start, False, budget)
        if self.tags is None:
            return None
        end = self.tokenizer.token_id(self.tags.close)
        if end is not None:
            start = self.tokenizer.token_id(self.tags.open.strip())
            return wire.Thinking([end], start, opened, budget)
        if constrained:
            if budget is not None:
                raise BadRequest(
                    "A budget for reasoning and a form of the answer cannot both be kept with "
                    "this model: the end of its reasoning is not a token.",
                    param="reasoning_effort",
                )
            return None
        close = self.tokenizer.encode(self.tags.close, add_special_tokens=False)
        return wire.Thinking(close, None, opened, budget)

    def _special(self, token: str) -> int | None:
        number = self.tokenizer.token_id(token)
        return number if number in self.tokenizer.special_ids else None


def _tidy(parts: Parse[None]) -> Parse[None]:
    """Without the white space that models put around calls; a text's own is kept."""
    held, called, said = "", False, False
    for part in parts:
        if isinstance(part, TextDelta):
            text = held + part.text
            if text.strip() or said:
                held, said = "", True
                yield TextDelta(text)
            else:
                held = text
            continue
        if isinstance(part, CallBegin | ReasoningDelta):
            held, said, called = "", False, True
        yield part
    if held and not called:
        yield TextDelta(held)


def _instructions(use: ToolUse) -> str:
    """What a model whose template knows no tools is told about them."""
    lines = [json.dumps(tool.definition["function"], ensure_ascii=False) for tool in use.tools]
    return "\n".join(
        [
            "You can call these functions, each described by a JSON schema:",
            "<tools>",
            *lines,
            "</tools>",
            "To call one, write exactly this, once for each call:",
            "<tool_call>",
            '{"name": "function name", "arguments": {"argument name": "value"}}',
            "</tool_call>",
        ]
    )


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    """A call or its result as text, for a template that has no place for them."""
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls: Sequence[dict[str, Any]] = message.get("tool_calls") or ()
    if not calls:
        return message
    written = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in calls
    ]
    content = "\n".join([*([message["content"]] if message["content"] else []), *written])
    return {"role": "assistant", "content": content}

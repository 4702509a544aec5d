"""The bodies of Ollama's `/api/chat` and `/api/generate`, and the conversations that they mean."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock import sampling
from penstock.errors import BadRequest
from penstock.server.fields.formats import schema_format
from penstock.server.fields.generation import (
    GenerationFields,
    MinP,
    Name,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopP,
)
from penstock.server.fields.whole_numbers import SmallCount, WholeNumbers
from penstock.server.http.free_form import (
    MAX_ARGUMENTS_BYTES,
    check_nesting,
    decode_small,
    is_given,
    kept_as_text,
)
from penstock.server.pipeline.conversation import Conversation
from penstock.server.protocols.content import (
    TemplateContent,
    TextContent,
    image_from_base64,
    template_content,
    text_content,
)
from penstock.server.protocols.ollama.go_template import template_pieces
from penstock.server.protocols.openai.completions import CompletionFields
from penstock.server.protocols.tool_fields import OpenAITools, openai_tool_use
from penstock.text.chat_format import Thinking
from penstock.text.grammars.grammar import Format

_DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|\d+(?:\.\d*)?)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(value: str | float, param: str) -> float:
    """Seconds, from a number or a text such as `1h30m`; whatever is negative is for ever."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value.strip())
        if found is None:
            raise BadRequest(
                f"`{param}` is {value[:40]!r}; it is a number of seconds or a duration such as "
                "10m or 1h30m.",
                param=param,
            )
        parts = re.findall(r"([\d.]+)([a-zµ]*)", found[2])
        value = sum(float(number) * _UNITS.get(unit, 1.0) for number, unit in parts)
        value = -value if found[1] == "-" else value
    return math.inf if value < 0 else value


class RawFields(CompletionFields, kw_only=True):
    """A text to be continued as it stands, with Ollama's own fields for the form and the length."""

    default_max_tokens: ClassVar[int | None] = None
    prompt: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    text: str
    wanted: Format | None = None

    def prompts(self, max_choices: int, window: int) -> list[str]:
        """The one text, already read."""
        return [self.text]

    def format(self) -> Format | None:
        """The form, already read."""
        return self.wanted


class Options(msgspec.Struct):
    """`options`, as far as they mean something here. `num_ctx` and `num_keep` do not: the window is
    the model's, and a prompt is served whole or refused."""

    num_predict: float | None = None
    temperature: Temperature | None = None
    top_k: Annotated[float, Meta(ge=-1, le=2**31)] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: int | float | None = None
    stop: str | list[str] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[float, Meta(ge=-1, le=2**31)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Refused unless they change nothing.
    mirostat: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None

    def __post_init__(self) -> None:
        for name, neutral in (("mirostat", 0), ("tfs_z", 1), ("typical_p", 1)):
            if getattr(self, name) not in (None, 0, neutral):
                raise BadRequest(f"`options.{name}` is not supported.", param=f"options.{name}")


class OllamaFunction(msgspec.Struct):
    """A call that the assistant made; its arguments are an object."""

    name: str
    arguments: Annotated[msgspec.Raw, kept_as_text(dict[str, Any])] = msgspec.field(
        default_factory=msgspec.Raw
    )


class OllamaCall(msgspec.Struct):
    """One of `tool_calls`."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(WholeNumbers, kw_only=True):
    """What the two bodies have in common."""

    model: Name
    stream: bool | None = None
    format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: Annotated[str, Meta(max_length=64)] | float | None = None
    logprobs: bool | None = None
    top_logprobs: SmallCount | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the model is only to be loaded, or unloaded."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse what cannot be kept."""

    def conversation(self) -> Conversation:
        """The same in the words of every protocol."""
        raise NotImplementedError

    def keep_alive_s(self) -> float | None:
        """How long the model is to stay once nobody uses it; None: as the server has it."""
        return None if self.keep_alive is None else duration_s(self.keep_alive, "keep_alive")

    def alternatives(self) -> int | None:
        """How many log-probabilities beside the chosen token's; None: none at all."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def settings(self) -> GenerationFields:
        """How to choose tokens."""
        return GenerationFields(**self._settings())

    def _settings(self) -> dict[str, Any]:
        options = self.options or Options()
        said = {name: getattr(options, each.ollama) for name, each in sampling.BY_NAME.items()}
        return {
            **said,
            "model": self.model,
            "top_k": _whole(options.top_k),
            "seed": _whole(options.seed),
            "repeat_last_n": _whole(options.repeat_last_n),
            "stop": options.stop or None,
        }

    def wanted_format(self) -> Format | None:
        """`"json"`, or a schema."""
        raw = bytes(self.format)
        if raw in (b"", b"null", b'""'):
            return None
        if raw == b'"json"':
            return Format("json_object", None, "format")
        return schema_format(self.format, "format")

    def thinking(self) -> Thinking:
        """On, off, or how much."""
        if isinstance(self.think, str):
            return Thinking(enabled=True, effort=self.think)
        return Thinking(enabled=self.think)

    def requested_tokens(self) -> int | None:
        """`num_predict`; none or less is as many as there is room for."""
        wanted = None if self.options is None else _whole(self.options.num_predict)
        return wanted if wanted is not None and wanted > 0 else None


class OllamaChatFields(OllamaRequest, kw_only=True):
    """The body of `/api/chat`."""

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: OpenAITools = msgspec.field(default_factory=msgspec.Raw)

    @property
    def is_empty(self) -> bool:
        """Without messages."""
        return not self.messages

    def conversation(self) -> Conversation:
        """Message by message."""
        return Conversation(
            fields=self.settings(),
            messages=[_template_message(m, index) for index, m in enumerate(self.messages)],
            max_tokens=self.requested_tokens(),
            logprobs=self.alternatives(),
            tools=openai_tool_use(self.tools, None, None),
            format=self.wanted_format(),
            thinking=self.thinking(),
        )


class OllamaGenerateFields(OllamaRequest, kw_only=True):
    """The body of `/api/generate`."""

    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[msgspec.Raw, kept_as_text(list[int])] = msgspec.field(
        default_factory=msgspec.Raw
    )
    raw: bool | None = None
    suffix: str | None = None
    images: list[str] | None = None

    @property
    def is_empty(self) -> bool:
        """Without a question."""
        return not self.prompt and not self.suffix

    def check(self) -> None:
        """Refuse what cannot be kept together."""
        texts = {"template": self.template, "system": self.system}
        conflicting = [name for name, text in texts.items() if text]
        conflicting += ["context"] if is_given(self.context) else []
        for name in conflicting:
            if self.raw:
                raise BadRequest(
                    f"`raw` takes the prompt as it stands; leave `{name}` out.", param=name
                )
        if self.suffix and is_given(self.context):
            raise BadRequest("`suffix` and `context` cannot be kept together.", param="context")

        if self.images and self.written() is not None:
            raise BadRequest(
                "`images` have their place in the model's own template; leave `template`, `raw` "
                "and `suffix` out.",
                param="images",
            )

    def written(self) -> list[str] | None:
        """The pieces of the text to be continued, where the model's own template has no say."""
        text, suffix = self.prompt or "", self.suffix or ""
        if self.template:
            values = {"System": self.system or "", "Prompt": text, "Suffix": suffix}
            return template_pieces(self.template, **values)
        return [text] if self.raw or suffix else None

    def as_text(self, pieces: list[str]) -> RawFields:
        """What was written, to be continued."""
        return RawFields(
            **self._settings(),
            text="".join(pieces),
            # A template has put it where it belongs.
            suffix=None if self.template else self.suffix or None,
            max_tokens=self.requested_tokens(),
            logprobs=self.alternatives(),
            wanted=self.wanted_format(),
        )

    def conversation(self) -> Conversation:
        """One question, with the system's word before it."""
        content = _with_images(self.prompt or "", self.images, "images", only_text=False)
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return Conversation(
            fields=self.settings(),
            messages=messages,
            max_tokens=self.requested_tokens(),
            logprobs=self.alternatives(),
            format=self.wanted_format(),
            thinking=self.thinking(),
            prompt_field="prompt",
        )


def _whole(number: float | None) -> int | None:
    """Numbers of clients that know no integers."""
    if number is None:
        return None
    return int(min(max(number, -(2**63)), 2**63 - 1))


def _with_images(
    text: str, images: list[str] | None, where: str, *, only_text: bool
) -> TemplateContent:
    """Images come before the text, as Ollama has them."""
    parts = [image_from_base64(one, f"{where}[{n}]") for n, one in enumerate(images or ())]
    shown = text_content if only_text else template_content
    return shown([*parts, TextContent(text)])


def _template_message(message: OllamaMessage, index: int) -> dict[str, Any]:
    content = _with_images(
        *(message.content or "", message.images, f"messages[{index}].images"),
        only_text=message.role != "user",
    )
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.tool_name:
        result["name"] = message.tool_name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call, index)},
            }
            for call in message.tool_calls
        ]
    return result


def _arguments(call: OllamaCall, index: int) -> dict[str, Any]:
    param = f"messages[{index}].tool_calls"
    raw = call.function.arguments
    arguments = decode_small(raw, dict[str, Any], param, MAX_ARGUMENTS_BYTES) or {}
    check_nesting(arguments, param)
    return arguments

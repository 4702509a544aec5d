"""A whole server in this process, over workers with a fake engine: real sockets, no torch."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock import config, shapes
from penstock.memory.clients.requests import RequestMemory
from penstock.server import run
from penstock.server.processes.fork_launcher import ForkLauncher
from penstock.server.processes.supervisor import Supervisor
from penstock.testing.fake_worker import FAKE_PRELOAD, FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

_START_S = 30.0
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def add_model(
    home: Path, name: str, behaviour: FakeModel | None = None, template: str = TEMPLATE
) -> Path:
    """A model whose worker behaves as told; its tokenizer has one token per byte of text."""
    behaviour = behaviour or FakeModel()
    folder = home / "models" / name
    folder.mkdir(parents=True)
    shapes.write_folder("random:tiny-llama", folder)
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings["max_position_embeddings"] = behaviour.context
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return behaviour.write(folder)


def add_encoder(
    home: Path, name: str, behaviour: FakeModel | None = None, *, scores: bool = False
) -> Path:
    """An embedder, or a cross-encoder; its answers are `FakeEngine`'s. Its tokenizer puts a special
    token before every text and, of a pair, before the second, which is a segment of its own."""
    folder = add_model(home, name, behaviour)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = "sentence_transformers.models."
    if scores:
        config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "x"}}
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    else:
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        listed = [
            {"idx": number, "path": place, "type": kind + module}
            for number, (module, place) in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed), "utf-8")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}', "utf-8")
        said = {"prompts": {"query": "q:", "document": ""}}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(said), "utf-8")
        usual = {"max_seq_length": (behaviour or FakeModel()).context // 2}
        (folder / "sentence_bert_config.json").write_text(json.dumps(usual), "utf-8")
    mark_tokens(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    first = tokenizer["post_processor"]["single"]
    begin = {"SpecialToken": {"id": shapes.BEGIN, "type_id": 1}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    tokenizer["post_processor"]["pair"] = [*first, begin, second]
    file.write_text(json.dumps(tokenizer), "utf-8")
    return folder


def mark_tokens(folder: Path) -> Path:
    """Give a model's tokenizer what `TEMPLATE` does without: a special token before every text, and
    marks of a gap that is to be filled, with the ids 300 to 302."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    for token, mark in enumerate(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), 300):
        del tokenizer["model"]["vocab"][words[token]]
        tokenizer["model"]["vocab"][mark] = token
        like = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"].append({**like, "id": token, "content": mark})
    first = {"SpecialToken": {"id": shapes.BEGIN, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    begin = tokenizer["model"]["vocab"][shapes.BEGIN]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text],
        "special_tokens": {
            shapes.BEGIN: {"id": shapes.BEGIN, "ids": [begin], "tokens": [shapes.BEGIN]}
        },
    }
    file.write_text(json.dumps(tokenizer), "utf-8")
    return folder


def lengthen_token(folder: Path, token: int, characters: int) -> Path:
    """Give one token of a model's vocabulary a text of so many characters."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    del tokenizer["model"]["vocab"][words[token]]
    tokenizer["model"]["vocab"]["x" * characters] = token
    file.write_text(json.dumps(tokenizer), "utf-8")
    return folder


class FakeServer:
    """A running server; `url` is where."""

    def __init__(self, home: Path, flags: dict[str, object]) -> None:
        self._config = config.load(
            environment={"PENSTOCK_HOME": str(home), "HF_HUB_CACHE": str(home / "none")},
            flags={"server.port": 0, "server.shutdown_grace_s": "0.2", **flags},
        )
        self._started: run.Started | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake server")

    @property
    def url(self) -> str:
        """The address."""
        assert self._started is not None
        return self._started.url

    def start(self) -> None:
        """Serve in a thread; raises what a start raises."""
        self._thread.start()
        assert self._up.wait(_START_S), "the server did not start"
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def stop(self) -> None:
        """End it and everything it has started."""
        if self._loop is not None and self._started is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._started.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._failure = error
            self._up.set()

    async def _serve(self) -> None:
        home = self._config.home
        launcher = ForkLauncher(
            home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD
        )
        supervisor = Supervisor(home, launcher)
        self._loop = asyncio.get_running_loop()
        await run.serve(self._config, supervisor, self._announce)

    def _announce(self, started: run.Started) -> None:
        self._started = started
        self._up.set()


@contextmanager
def serving(home: Path, **flags: object) -> Iterator[FakeServer]:
    """A server over the models in `home`; `server_port=0` sets `server.port`."""
    server = FakeServer(home, {key.replace("_", ".", 1): value for key, value in flags.items()})
    server.start()
    try:
        yield server
    finally:
        server.stop()


def watch_bookings(patch: pytest.MonkeyPatch) -> list[int]:
    """What a request holds of the books, whenever it has been given more."""
    held, grow = [0], RequestMemory.grow

    async def noted(memory: RequestMemory, size: int) -> None:
        await grow(memory, size)
        held.append(memory.held)

    patch.setattr(RequestMemory, "grow", noted)
    return held

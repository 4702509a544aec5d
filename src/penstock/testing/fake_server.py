"""A whole server in this process, over workers with a fake engine: real sockets, no torch."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock import config, shapes
from penstock.server import run
from penstock.server.supervisor import Supervisor
from penstock.testing.fake_worker import FAKE_PRELOAD, FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
        supervisor = Supervisor(
            self._config.home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD
        )
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

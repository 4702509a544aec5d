"""Whose KV a file on disk is: everything by which it could be another's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.catalog.kv_formats import INT8, KvFormat, kv_format
from penstock.worker.backends import open_backend
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.kv import identity
from penstock.worker.kv.arena import LayerGeometry
from penstock.worker.kv.groups import LayerGroup
from penstock.worker.kv.identity import FilesChanged, ModelFiles, numerics
from penstock.worker.kv.memory import KvMemory
from penstock.worker.models.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from pathlib import Path

FLOAT32 = kv_format("auto", "float32")
LAYERS = dict.fromkeys(range(2), LayerGeometry(2, 64, 64))


def memory(block_tokens: int = 16, form: KvFormat = FLOAT32, window: int | None = None) -> KvMemory:
    size = form.token_bytes(sum(layer.size_bytes(form) for layer in LAYERS.values()), block_tokens)
    groups = (LayerGroup((0, 1), window, size, block_tokens),)
    return KvMemory(groups, LAYERS, form, CpuBackend(), [4])


def kv_of(
    kept: KvMemory, processor: str, kernels: object, dtype: torch.dtype = torch.float32
) -> str:
    return numerics(kept, dtype, processor, kernels)


class OtherKernels(ReferenceKernels):
    """Of another name."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "modeling_own.py"):
        (folder / name).write_text(name)
    return folder


def digest(model: Path, *, with_code: bool = False) -> str:
    return ModelFiles.now(model, with_code=with_code).digest(model.parent / "digests.json")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "another.safetensors", "other.gguf"]
)
def test_it_is_of_weights_and_configs(model: Path, name: str) -> None:
    before = digest(model)
    assert digest(model) == before
    (model / name).write_text("something else")
    assert digest(model) != before


@pytest.mark.parametrize("name", ["modeling_own.py", "parts/more.py"])
def test_it_is_of_the_models_own_code_where_that_is_run(model: Path, name: str) -> None:
    untrusted, trusted = digest(model), digest(model, with_code=True)
    assert untrusted != trusted
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("something else")
    assert digest(model) == untrusted
    assert digest(model, with_code=True) != trusted


def test_what_is_remembered_is_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(model)
    monkeypatch.setattr(identity, "_digest", lambda _: pytest.fail("read again"))
    assert digest(model) == before


@pytest.mark.parametrize("change", ["written", "replaced", "added", "gone", "while it is read"])
def test_files_that_are_not_the_loaded_ones_have_none(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    loaded = ModelFiles.now(model, with_code=False)
    file = model / "model.safetensors"
    if change == "written":
        file.write_text("something else")
    elif change == "replaced":
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        other = model / "part"
        other.write_bytes(b"x" * file.stat().st_size)
        os.utime(other, ns=times)
        other.replace(file)
    elif change == "added":
        (model / "generation_config.json").write_text("{}")
    elif change == "gone":
        (model / "config.json").unlink()
    else:
        read = identity._digest

        def slow(path: Path) -> str:
            found = read(path)
            file.write_text("something else")
            return found

        monkeypatch.setattr(identity, "_digest", slow)
    with pytest.raises((FilesChanged, FileNotFoundError)):
        loaded.digest(model.parent / "digests.json")


def test_it_is_of_who_computes_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, kernels = CpuBackend().processor, ReferenceKernels()
    found = [
        kv_of(memory(), cpu, kernels),
        kv_of(memory(), cpu, OtherKernels()),
        kv_of(memory(32), cpu, kernels),
        kv_of(memory(form=kv_format("auto", "bfloat16")), cpu, kernels),
        kv_of(memory(form=INT8), cpu, kernels),
        kv_of(memory(form=INT8), cpu, kernels, torch.bfloat16),
        kv_of(memory(window=64), cpu, kernels),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    found.append(kv_of(memory(), open_backend("cuda:0").processor, kernels))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another card")
    found.append(kv_of(memory(), open_backend("cuda:0").processor, kernels))
    for name in ("penstock", "torch", "transformers"):
        library = getattr(identity, name)
        with monkeypatch.context() as newer:
            newer.setattr(library, "__version__", "another")
            found.append(kv_of(memory(), cpu, kernels))
    assert [one for one in found if found.count(one) > 1] == []
    assert kv_of(memory(), cpu, kernels) == found[0]


def test_of_half_a_file_there_is_no_digest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        def update(self, _: bytes) -> None:
            raise MemoryError

    monkeypatch.setattr(identity.hashlib, "blake2b", lambda **_: Short())  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        identity._digest(model / "config.json")

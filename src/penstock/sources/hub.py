"""Models from the Hugging Face hub, through its own library: resumable, checked by its hashes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from penstock.errors import ModelUnusable, PullFailed
from penstock.sources.folder import wanted_files
from penstock.sources.staging import folder_bytes, require_disk, watched

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.sources.staging import Progress

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def download_repository(
    repository: str, revision: str | None, target: Path, progress: Progress
) -> str:
    """Bring the wanted files of a hub repository into `target`; the commit they are of."""
    if not _REPOSITORY.fullmatch(repository):
        raise PullFailed(f"{repository!r} is not a hub repository; write hf:ORG/NAME[@REVISION].")
    try:
        return _download(repository, revision, target, progress)
    except GatedRepoError as error:
        raise PullFailed(
            f"{repository} is gated: accept its terms on the hub and set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise PullFailed(f"{repository} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise PullFailed(
            f"The hub has no model {repository}, or it is private and HF_TOKEN is not set."
        ) from error
    except (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        httpx.HTTPError,
    ) as error:
        raise PullFailed(
            f"The Hugging Face hub could not be reached for {repository} "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). What was fetched is kept: "
            "the same command goes on from there. HF_ENDPOINT names another hub; "
            "`penstock pull smollm2` needs none."
        ) from error


def _download(repository: str, revision: str | None, target: Path, progress: Progress) -> str:
    huggingface_hub.utils.disable_progress_bars()
    api = huggingface_hub.HfApi()
    info = api.model_info(repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files = wanted_files(sizes)
    if not any(name.endswith(".safetensors") for name in files):
        raise ModelUnusable(f"{repository} has no safetensors weights.")
    total = sum(sizes[name] for name in files)
    require_disk(target, max(0, total - folder_bytes(target)), f"Downloading {repository}")
    with watched(target, "download", total, progress):
        for name in files:
            api.hf_hub_download(repository, name, revision=info.sha, local_dir=target)
    progress("download", total, total)
    return str(info.sha)

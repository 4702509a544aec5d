"""Which weights are mapped from a model's files, and which are copies in memory of our own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def copied_bytes(tensors: Iterable[Tensor], folder: Path) -> int:
    """What of these lies in memory of our own, and not in a mapping of one of the folder's files.

    By their addresses: not every page of a mapping has been read by now.
    """
    ranges = _mapped_ranges(folder)
    return sum(
        tensor.nbytes
        for tensor in tensors
        if not any(begin <= tensor.data_ptr() < end for begin, end in ranges)
    )


def _mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Where the files in `folder` are mapped."""
    files = {str(file.resolve()) for file in folder.iterdir() if file.is_file()}
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        words = line.split(None, 5)  # range, rights, offset, device, inode, file
        if len(words) == 6 and words[5] in files:
            begin, _, end = words[0].partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found

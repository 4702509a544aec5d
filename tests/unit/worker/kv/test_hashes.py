"""Keys of blocks: what they depend on, and from which block on."""

from __future__ import annotations

import pytest

from penstock.wire import Media
from penstock.worker.kv.hashes import BlockHashes, group_key, media_extras, root_key

TOKENS = list(range(16))


def keys(salt: bytes = b"", extras: dict[int, bytes] | None = None) -> list[bytes]:
    hashes = BlockHashes(root_key(salt), TOKENS, 4, extras)
    return [hashes.key(index) for index in range(4)]


def test_an_attachment_changes_keys_from_its_block_on() -> None:
    plain, one, other = keys(), keys(extras={2: b"one"}), keys(extras={2: b"other"})
    assert plain[:2] == one[:2] == other[:2]
    assert len({*plain[2:], *one[2:], *other[2:]}) == 6


def test_a_salt_changes_all_keys() -> None:
    assert not set(keys(b"a")) & set(keys(b"b"))


def extras(*images: tuple[bytes, list[int]]) -> dict[int, bytes]:
    return media_extras([Media(digest * 16, b"", runs) for digest, runs in images], 4)


def test_an_image_is_in_the_keys_of_all_blocks_that_have_some_of_it() -> None:
    one = extras((b"a", [2, 7]))
    assert sorted(one) == [0, 1, 2]
    # Where in the image a block begins counts: the second block of a long one is not the first.
    assert len(set(one.values())) == 3
    assert one == extras((b"a", [2, 7])) != extras((b"b", [2, 7]))


def test_a_block_with_two_images_has_both() -> None:
    both = extras((b"a", [0, 2]), (b"b", [2, 2]))
    assert both != extras((b"b", [0, 2]), (b"a", [2, 2]))
    assert both[0] == extras((b"a", [0, 2]))[0] + extras((b"b", [2, 2]))[0]


def test_rows_of_runs_are_counted_on() -> None:
    runs = extras((b"a", [0, 3, 5, 3]))
    assert runs[0][16:] == (0).to_bytes(4, "little")
    assert runs[1][16:] == (3).to_bytes(4, "little")


def test_an_image_without_a_digest_has_no_key() -> None:
    with pytest.raises(AssertionError):
        media_extras([Media(b"", b"", [0, 4])], 4)


def test_groups_have_keys_of_their_own_in_one_name_space() -> None:
    assert len({group_key(keys()[0], group) for group in range(3)}) == 3

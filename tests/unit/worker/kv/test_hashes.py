"""Keys of blocks: what they depend on, and from which block on."""

from __future__ import annotations

from penstock.worker.kv.hashes import BlockHashes, group_key, root_key

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


def test_groups_have_keys_of_their_own_in_one_name_space() -> None:
    assert len({group_key(keys()[0], group) for group in range(3)}) == 3

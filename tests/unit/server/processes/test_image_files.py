"""Files of images on their way into a worker: no more at once than it has booked."""

from __future__ import annotations

import asyncio

from penstock.server.processes.image_files import ImageFiles
from penstock.wire import Media


def media(size: int) -> list[Media]:
    return [Media(b"", b"x" * size, [])]


def test_whoever_comes_first_goes_first() -> None:
    asyncio.run(_in_turn())


async def _in_turn() -> None:
    files, order = ImageFiles(10), []

    async def ask(name: str, size: int, done: asyncio.Event) -> None:
        async with files.held(media(size)) as held:
            order.append(name)
            await done.wait()
            held.give()
            held.give()  # a second time changes nothing

    ends = [asyncio.Event() for _ in range(4)]
    sizes = {"a": 6, "b": 6, "c": 2, "none": 0}
    asked = zip(sizes.items(), ends, strict=True)
    tasks = [asyncio.ensure_future(ask(name, size, end)) for (name, size), end in asked]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a", "none"] and files.used_bytes == 6
    ends[0].set()
    for _ in range(4):
        await asyncio.sleep(0)
    assert order == ["a", "none", "b", "c"] and files.used_bytes == 8
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)
    assert files.used_bytes == 0


def test_who_gives_up_leaves_the_line() -> None:
    asyncio.run(_cancelled())


async def _cancelled() -> None:
    files = ImageFiles(10)
    async with files.held(media(8)):

        async def ask(size: int) -> None:
            async with files.held(media(size)):
                pass

        waiting = asyncio.ensure_future(ask(8))
        behind = asyncio.ensure_future(ask(2))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await behind  # it stood behind one who has left
        assert files.used_bytes == 8
    assert files.used_bytes == 0


def test_one_alone_is_let_in_whatever_the_limit() -> None:
    asyncio.run(_alone())


async def _alone() -> None:
    files = ImageFiles(1)
    async with files.held(media(50)):
        assert files.used_bytes == 50

"""The links of the chaos suite themselves."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from chaos_links import Link, Links

from eldr.cluster.ports import LOOPBACK, free_ports


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture
def links() -> Iterator[Links]:
    with Links() as running:
        yield running


async def echo(port: int) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
            await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, LOOPBACK, port)


async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> bytes:
    writer.write(word)
    return await asyncio.wait_for(reader.readexactly(len(word)), 5)


async def waits(link: Link, requests: int, answers: int) -> None:
    for _ in range(1000):
        if (link.requests.held, link.answers.held) == (requests, answers):
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"{link.requests.held} requests and {link.answers.held} answers are held")


@pytest.mark.parametrize("side", ["requests", "answers"])
async def test_a_link_holds_one_direction_back_and_lets_it_go(
    links: Links, ports: list[int], side: str
) -> None:
    link = links.add(*ports)
    async with await echo(ports[1]):
        ends = await asyncio.open_connection(LOOPBACK, ports[0])
        assert await say(*ends, b"one") == b"one"
        links.hold(link, **{side: True})
        answer = asyncio.create_task(say(*ends, b"two"))
        await waits(link, side == "requests", side == "answers")
        assert not answer.done()
        links.hold(link)
        assert await answer == b"two"
        ends[1].close()


async def test_connections_of_a_cut_link_are_reset_when_it_is_mended(links: Links, ports: list[int]) -> None:
    link = links.add(*ports)
    async with await echo(ports[1]):
        reader, writer = await asyncio.open_connection(LOOPBACK, ports[0])
        assert await say(reader, writer, b"one") == b"one"
        links.hold(link, requests=True, answers=True)
        writer.write(b"two")
        await waits(link, 1, 0)
        links.heal(link)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(3), 5)
        ends = await asyncio.open_connection(LOOPBACK, ports[0])
        assert await say(*ends, b"new") == b"new"
        ends[1].close()


async def test_a_link_to_nobody_resets_its_connections(links: Links, ports: list[int]) -> None:
    links.add(*ports)
    reader, _ = await asyncio.open_connection(LOOPBACK, ports[0])
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 5)


def test_no_thread_is_left(ports: list[int]) -> None:
    with Links() as running:
        running.add(*ports)
    assert not [thread for thread in threading.enumerate() if thread.name == "links"]

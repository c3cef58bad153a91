import asyncio

from eldr.router.broadcast import Broadcast


async def test_every_reader_sees_what_is_published_while_it_is_subscribed():
    broadcast = Broadcast()
    broadcast.publish("before")
    with broadcast.subscribe() as one, broadcast.subscribe() as two:
        broadcast.publish("now")
        assert await anext(one) == ("now", 0)
        assert await anext(two) == ("now", 0)
        waiting = asyncio.create_task(anext(one))
        await asyncio.sleep(0)
        broadcast.publish("later")
        assert await waiting == ("later", 0)
    assert broadcast.readers == 0


async def test_a_slow_reader_loses_the_oldest_and_learns_how_many():
    broadcast = Broadcast(backlog=2)
    with broadcast.subscribe() as events:
        for number in range(5):
            broadcast.publish(number)
        assert [await anext(events), await anext(events)] == [(3, 3), (4, 3)]


async def test_closing_ends_readers_after_what_they_have():
    broadcast = Broadcast()
    with broadcast.subscribe() as events:
        broadcast.publish("last")
        broadcast.close()
        assert [event async for event, _ in events] == ["last"]

"""Random creates, steers, cancels and disconnects on 32 lanes a socket: everything is answered, nothing leaks."""

import asyncio
import random

import pytest
from doubles_engine import until
from doubles_lanes import MAX_IN_FLIGHT, RandomClient
from doubles_socket import Live, in_loop, scripted_server
from websockets.exceptions import ConnectionClosed


async def stay(live: Live, name: str, seed: int, num_messages: int) -> RandomClient:
    """Have everything answered."""
    async with live.connect() as socket:
        client = RandomClient(socket, name, random.Random(seed), num_messages)
        async with asyncio.timeout(40):
            await client.run()
    return client


async def leave(live: Live, name: str, seed: int) -> None:
    """Go away in the middle, in one way or another, a few times."""
    dice = random.Random(seed)
    for turn in range(6):
        socket = await live.connect()
        client = RandomClient(socket, f"{name}{turn}", dice, 10**6)
        sending = asyncio.gather(client.send(), client.read(), return_exceptions=True)
        await asyncio.sleep(dice.random() * 0.3)
        if dice.random() < 0.5:
            socket.transport.abort()
        else:
            await socket.close()
        outcomes = [outcome for outcome in await sending if not isinstance(outcome, ConnectionClosed | None)]
        assert not outcomes


async def storm(seed: int, num_messages: int) -> None:
    async with scripted_server(step_time_s=0.002, resume_grace_s=0.3) as live:
        async with asyncio.TaskGroup() as tasks:
            staying = [
                tasks.create_task(stay(live, name, seed + place, num_messages)) for place, name in enumerate("ab")
            ]
            for place, name in enumerate("xy"):
                tasks.create_task(leave(live, name, seed + 100 + place))
        clients = [task.result() for task in staying]
        await live.lose_connections()
        await until(lambda: not len(live.state.live_responses))
        await live.become_idle()
        stats = live.engine.stats().scheduler
        assert (stats.num_held_pages, stats.num_leased_pages) == (0, 0)
    for client in clients:
        assert client.max_in_flight == MAX_IN_FLIGHT
        assert client.num_steered > num_messages / 100
        assert client.num_cancelled
        assert client.num_parked
        for lane in client.lanes.values():
            assert not any(answer.parked for answer in lane.answers.values() if answer is not lane.last)


@in_loop
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_storm_of_lanes(seed: int) -> None:
    await storm(seed, 500)


@pytest.mark.full
@in_loop
@pytest.mark.parametrize("seed", range(10, 18))
async def test_a_longer_storm_of_lanes(seed: int) -> None:
    await storm(seed, 1500)

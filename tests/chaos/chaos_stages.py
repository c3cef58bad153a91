"""Brings requests to a stage and knows it from the processes' own state; reads what is left afterwards."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

import aiohttp
from chaos_fleet import ChaosFleet, LinkedServer
from chaos_load import End, Load

from eldr.client import DecoderState, PrefillStatus, RouterClient, WorkerClient, WorkerHealth

STAGE_S = 20.0
POLL_S = 0.02


class Stage(StrEnum):
    """Where requests are when something happens to a process."""

    BEFORE_PREFILL = "before_prefill"
    DURING_PREFILL = "during_prefill"
    BETWEEN_LEGS = "between_legs"
    BEFORE_FIRST_TOKEN = "before_first_token"
    MID_STREAM = "mid_stream"


async def until(
    holds: Callable[[], Awaitable[Any]], within_s: float, what: str, pause_s: float = POLL_S
) -> None:
    """Polls until it holds. Fails with `what` and the last value where it does not in time."""
    end = time.monotonic() + within_s
    while True:
        value = await holds()
        if value is True:
            return
        assert time.monotonic() < end, f"{what}: not within {within_s:g} s, last seen {value}"
        await asyncio.sleep(pause_s)


async def prefill_status(server: LinkedServer) -> PrefillStatus:
    async with WorkerClient(server.grpc_address) as client:
        return await client.get_prefill_status()


async def decoder_state(server: LinkedServer) -> DecoderState:
    async with WorkerClient(server.grpc_address) as client:
        return await client.get_state()


async def bookings(fleet: ChaosFleet) -> dict[str, int]:
    """Bookings at the router by worker, where there are any."""
    async with RouterClient(fleet.router_address) as router:
        return {w.info.worker_id: w.bookings for w in await router.workers() if w.bookings}


def hold_back(fleet: ChaosFleet, stage: Stage) -> None:
    """Closes the gates at which the requests to come shall wait."""
    if stage is Stage.BEFORE_PREFILL:
        for server in fleet.prefill:
            fleet.proxies.hold(fleet.links[server.name], requests=True)
    elif stage in (Stage.BETWEEN_LEGS, Stage.BEFORE_FIRST_TOKEN):
        for server in fleet.decode:
            early = stage is Stage.BETWEEN_LEGS
            fleet.proxies.hold(fleet.links[server.name], requests=early, answers=not early)


def let_go(fleet: ChaosFleet, but: str = "") -> None:
    """Opens the gates of all servers' links but that of `but`."""
    for server in fleet.servers:
        if server.name != but:
            fleet.proxies.hold(fleet.links[server.name])


async def reached(fleet: ChaosFleet, stage: Stage, load: Load) -> None:
    """Returns while requests of `load` are at the stage at prefill-0 or decode-0."""
    prefill, decode = fleet.prefill[0], fleet.decode[0]
    begin = await decoder_state(decode)

    async def before_prefill() -> Any:
        status, booked = await prefill_status(prefill), await bookings(fleet)
        at_link = fleet.links[prefill.name].requests.held
        seen = (at_link, booked, status.kv_usage, status.held_transfers)
        return True if at_link and booked.get(prefill.name) and not any(seen[2:]) else seen

    async def during_prefill() -> Any:
        status = await prefill_status(prefill)
        seen = (status.kv_usage, status.held_transfers)
        assert any(sent.end is None for sent in load.sent), "all prompts were prefilled unseen"
        return True if status.kv_usage and not status.held_transfers else seen

    async def between_legs() -> Any:
        held = (await prefill_status(prefill)).held_transfers
        state, booked = await decoder_state(decode), await bookings(fleet)
        at_link = fleet.links[decode.name].requests.held
        seen = (held, at_link, booked, state.running + state.waiting)
        return True if held and at_link and booked.get(decode.name) and not seen[3] else seen

    async def before_first_token() -> Any:
        state = await decoder_state(decode)
        at_link = fleet.links[decode.name].answers.held
        seen = (at_link, state.totals.decode_tokens - begin.totals.decode_tokens)
        assert not any(sent.token_ids for sent in load.sent)
        return True if at_link and state.reservation_ids else seen

    async def mid_stream() -> Any:
        state = await decoder_state(decode)
        seen = [(sent.decode, len(sent.token_ids)) for sent in load.sent if sent.streams]
        flows = any(
            sent.decode == decode.name and len(sent.token_ids) >= 3 and sent.end is None for sent in load.sent
        )
        return True if flows and state.running else seen

    checks = {
        Stage.BEFORE_PREFILL: before_prefill,
        Stage.DURING_PREFILL: during_prefill,
        Stage.BETWEEN_LEGS: between_legs,
        Stage.BEFORE_FIRST_TOKEN: before_first_token,
        Stage.MID_STREAM: mid_stream,
    }
    pause_s = 0.0 if stage is Stage.DURING_PREFILL else POLL_S
    await until(checks[stage], STAGE_S, stage, pause_s)


async def all_live(fleet: ChaosFleet, within_s: float) -> None:
    """Waits until the router takes every worker for well."""

    async def live() -> Any:
        async with RouterClient(fleet.router_address) as router:
            health = {w.info.worker_id: w.health for w in await router.workers()}
        well = [health.get(server.name) is WorkerHealth.LIVE for server in fleet.servers]
        return True if all(well) else health

    await until(live, within_s, "every worker is live", 0.1)


async def nothing_left(fleet: ChaosFleet, within_s: float) -> None:
    """Waits for zero bookings, held transfers, used KV blocks, running requests and reservations."""

    async def none() -> Any:
        left: dict[str, Any] = {**await bookings(fleet)}
        for server in fleet.prefill:
            status = await prefill_status(server)
            if status.held_transfers or status.kv_usage:
                left[f"{server.name} KV"] = (status.held_transfers, status.kv_usage)
        for server in fleet.decode:
            state = await decoder_state(server)
            if state.running or state.waiting or state.kv_usage or state.reservation_ids:
                left[f"{server.name} state"] = (state.running, state.waiting, state.kv_usage)
        return left or True

    await until(none, within_s, "nothing is left", 0.1)


async def leases_ended(fleet: ChaosFleet, within_s: float) -> None:
    """Waits until no prefill worker holds KV for a decoder."""

    async def none() -> Any:
        held = [(await prefill_status(server)).held_transfers for server in fleet.prefill]
        return held if any(held) else True

    await until(none, within_s, "no lease is older than its limit")


async def serves_again(fleet: ChaosFleet, fresh: Callable[[], Load], within_s: float) -> None:
    """Waits until a few requests all end well, and every worker has had some: no breaker is open any more."""
    idle = {server.name for server in fleet.servers}

    async def well() -> Any:
        async with fresh() as load:
            ended = await load.ended(30)
            ends = [(sent.end, sent.detail) for sent in load.sent]
        if not ended or any(end is not End.DONE for end, _ in ends):
            return ends
        idle.difference_update(*({sent.prefill, sent.decode} for sent in load.sent))
        return f"nothing came to {sorted(idle)}" if idle else True

    await until(well, within_s, "every worker serves again", 0.5)


async def metric_sum(server: LinkedServer, name: str) -> float:
    """Sum of a metric of a vLLM server over its label sets."""
    async with aiohttp.ClientSession() as session, session.get(server.http_url + "/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)

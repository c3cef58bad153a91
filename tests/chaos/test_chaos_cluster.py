"""Processes of a real cluster die, hang or are cut off at each stage of a request, under load.

Whatever happens: no request hangs, no answer is wrong, nothing stays booked or held, nothing lives on.
A slice runs with the other cluster tests; `tox run -e chaos` runs every process, fault and stage.
"""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from chaos_fleet import LEASE_S, PATIENT_LIMITS, ChaosFleet, Fault
from chaos_load import End, Load, Sent, request
from chaos_stages import (
    Stage,
    all_live,
    decoder_state,
    hold_back,
    leases_ended,
    let_go,
    metric_sum,
    nothing_left,
    prefill_status,
    reached,
    serves_again,
    until,
)

from eldr.cluster.ports import LOOPBACK, free_ports
from eldr.demo.references import reference_outputs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Cell = tuple[str, Fault, Stage]

PROCESSES = ("router", "gateway", "prefill-0", "decode-0")
MATRIX: list[Cell] = list(itertools.product(PROCESSES, Fault, Stage))
SLICE: list[Cell] = [
    ("router", Fault.KILL, Stage.MID_STREAM),
    ("gateway", Fault.KILL, Stage.BEFORE_FIRST_TOKEN),
    ("prefill-0", Fault.STOP, Stage.DURING_PREFILL),
    ("prefill-0", Fault.CUT, Stage.BEFORE_PREFILL),
    ("decode-0", Fault.KILL, Stage.BETWEEN_LEGS),
]

IN_FLIGHT = 6
HANG_S = 60.0
"""No request may take longer, whatever happens: three attempts with the time limits of the fleet's gateway."""

CLIENT_HOLD_S = 3.0
"""How long a gateway is stopped or cut off: nothing that it holds can end for its clients meanwhile."""

LEFT_S = 20.0
"""Bookings of a gateway that died go after 12 s, KV that nobody asks for after its lease of 6 s."""

RECOVERY_S = 30.0


def load_of(texts: Iterator[str], stage: Stage) -> list[tuple[str, int, bool]]:
    """Prompts, output tokens and whether to stream. Long prompts widen the time in which they are prefilled."""
    width = 3 if stage is Stage.DURING_PREFILL else 1
    tokens = 160 if stage is Stage.MID_STREAM else 12
    return [(" ".join(itertools.islice(texts, width))[:900], tokens, i % 2 == 0) for i in range(IN_FLIGHT)]


def all_must_be_served(cell: Cell) -> bool:
    """Where the rest of the fleet can end every request well, it has to."""
    process, fault, stage = cell
    if process == "router":
        return stage in (Stage.BETWEEN_LEGS, Stage.BEFORE_FIRST_TOKEN, Stage.MID_STREAM)
    return process == "decode-0" and fault is Fault.KILL and stage is not Stage.MID_STREAM


async def check_answers(fleet: ChaosFleet, sents: list[Sent]) -> None:
    """Compares with what a server answers that computes the whole request by itself."""
    expected = await reference_outputs(
        fleet.prefill[0].http_url,
        [
            type(sent.request)(sent.request.request_id, "", {**sent.request.body, "stream": False})
            for sent in sents
        ],
        IN_FLIGHT,
        120,
    )
    wrong = {sent.request.request_id: sent.wrong(expected[sent.request.request_id]) for sent in sents}
    assert not any(wrong.values()), wrong


async def test_whatever_happens_to_a_process(fleet: ChaosFleet, cell: Cell, texts: Iterator[str]) -> None:
    process, fault, stage = cell
    requests = [request(f"{i}", *what) for i, what in enumerate(load_of(texts, stage))]
    await all_live(fleet, RECOVERY_S)
    hold_back(fleet, stage)
    try:
        async with Load(fleet.url, requests) as load:
            await reached(fleet, stage, load)
            fleet.strike(process, fault)
            try:
                let_go(fleet, but=process if fault is Fault.CUT else "")
                if process == "gateway" and fault is not Fault.KILL:
                    await asyncio.sleep(CLIENT_HOLD_S)
                    fleet.mend(process, fault)
                ended = await load.ended(HANG_S)
            finally:
                if process != "gateway" or fault is Fault.KILL:
                    fleet.mend(process, fault)
            print([(sent.end, round(sent.seconds, 1), sent.detail[:90]) for sent in load.sent])
            assert ended, f"a request hangs: {[sent for sent in load.sent if sent.end is None]}"
    finally:
        let_go(fleet)
    await leases_ended(fleet, LEASE_S + 2)
    await all_live(fleet, RECOVERY_S)
    await nothing_left(fleet, LEFT_S)
    await check_answers(fleet, load.sent)
    if all_must_be_served(cell):
        assert all(sent.end is End.DONE for sent in load.sent), load.sent

    def fresh() -> Load:
        return Load(fleet.url, [request(f"f{i}", next(texts), 4, bool(i % 2)) for i in range(4)])

    await serves_again(fleet, fresh, RECOVERY_S)
    await nothing_left(fleet, LEFT_S)


async def test_kv_of_an_ended_lease_is_never_used(fleet: ChaosFleet, texts: Iterator[str]) -> None:
    """Case 2.1: decoders stop for longer than the lease, prefill gives the blocks to others, decoders go on."""
    prefill = fleet.prefill
    late_name = "vllm:nixl_num_notifications_after_expiry_total"
    await all_live(fleet, RECOVERY_S)
    await nothing_left(fleet, LEFT_S)
    port = free_ports(1)[0]
    fleet.start_gateway("patient", port, PATIENT_LIMITS)
    refused = [(await decoder_state(server)).totals.refused_transfers for server in fleet.decode]
    requests = [request(f"late-{i}", next(texts), 16, bool(i % 2)) for i in range(4)]
    for server in fleet.decode:
        fleet.strike(server.name, Fault.STOP)
    try:
        async with Load(f"http://{LOOPBACK}:{port}", requests) as load:

            async def held() -> int | bool:
                count = sum([(await prefill_status(server)).held_transfers for server in prefill])
                return True if count == len(requests) else count

            async def expired() -> int | bool:
                return sum([(await prefill_status(server)).held_transfers for server in prefill]) or True

            await until(held, 20, "every hand-off waits for its decoder")
            await until(expired, LEASE_S + 10, "every lease has ended")
            for server in prefill:
                await churn(server.http_url, texts)
            for server in fleet.decode:
                fleet.mend(server.name, Fault.STOP)
            assert await load.ended(HANG_S)
    finally:
        for server in fleet.decode:
            fleet.mend(server.name, Fault.STOP)
        fleet.supervisor.stop("patient")
    print([(sent.end, round(sent.seconds, 1), sent.detail[:90]) for sent in load.sent])
    assert [sent.end for sent in load.sent] == [End.DONE] * len(requests)
    await check_answers(fleet, load.sent)
    now = [(await decoder_state(server)).totals.refused_transfers for server in fleet.decode]
    assert sum(now) - sum(refused) == len(requests), "each of them was pulled too late"
    assert sum([await metric_sum(server, late_name) for server in prefill]) >= len(requests)
    await all_live(fleet, RECOVERY_S)
    await nothing_left(fleet, LEFT_S)


async def churn(url: str, texts: Iterator[str]) -> None:
    """Has a prefill server fill its whole KV cache with other prompts."""
    prompts = [request(f"churn-{i}", next(texts), 1, False) for i in range(80)]
    async with Load(url, prompts) as load:
        assert await load.ended(60)
        assert all(sent.end is End.DONE for sent in load.sent), load.sent[0]

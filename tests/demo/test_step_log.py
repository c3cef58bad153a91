"""Samples of decode steps are differences of a decoder's totals."""

import asyncio

import grpc
import pytest

from eldr.client import RouterUnreachableError
from eldr.demo import step_log
from eldr.demo.step_log import StepLog, StepSample
from eldr.routing.state import DecoderState, DecoderTotals
from eldr.rpc.worker_status import WorkerHealth, WorkerStatus


def status(totals, incarnation="i"):
    state = DecoderState("d", incarnation, 1, totals=totals)
    return WorkerStatus(
        info=None, health=WorkerHealth.LIVE, bookings=0, state_age_s=0.0, state=state, reason=""
    )


def test_a_sample_is_the_mean_between_two_reports():
    log = StepLog()
    log.see([status(DecoderTotals(10, 100, 4000.0, 1.0))])
    log.see([status(DecoderTotals(30, 400, 13000.0, 3.0))])
    assert log.samples == [StepSample("d", 20, 15.0, 30.0, pytest.approx(100.0))]


def test_what_ran_before_the_first_report_or_in_another_process_is_no_sample():
    log = StepLog()
    log.see([status(DecoderTotals(10, 100, 4000.0, 1.0))])
    log.see([status(DecoderTotals(20, 200, 8000.0, 2.0), "j")])
    log.see([status(DecoderTotals(20, 200, 8000.0, 2.0), "j")])
    assert log.samples == []


def test_a_worker_without_a_report_is_passed_over():
    log = StepLog()
    log.see(
        [
            WorkerStatus(
                info=None, health=WorkerHealth.STARTING, bookings=0, state_age_s=-1.0, state=None, reason=""
            )
        ]
    )
    assert log.samples == []


async def test_a_router_that_does_not_answer_once_is_counted_and_asked_again(monkeypatch):
    monkeypatch.setattr(step_log, "PERIOD_S", 0.0)
    log, asked_twice = StepLog(), asyncio.Event()

    async def workers():
        if log.missed:
            asked_twice.set()
            return []
        raise RouterUnreachableError(grpc.StatusCode.UNAVAILABLE, "slow")

    following = asyncio.create_task(log.follow(workers))
    await asked_twice.wait()
    following.cancel()
    assert log.missed == 1

"""Refits and drift behind the decisions of a router."""

from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest
from router_rig import CoreRig, fake_profile, served, until

from eldr.calibration.drift import baseline
from eldr.calibration.fit_record import ClusterRecord
from eldr.calibration.live import unit_vectors
from eldr.router.refit import DRIFT_PERIOD_S, LiveFit
from eldr.router.settings import RouterSettings
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerRole
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.fake_services import fake_info
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature

ONLINE = "locality-band-online"
ZERO = ExpertSignature(FAKE_GEOMETRY.fingerprint, 2, 4, 0, np.zeros((2, 8), np.uint32))


class HeldExecutor(Executor):
    """Runs what it was given when told."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Any]] = []

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, lambda: work(*args, **kwargs)))
        return future

    def run(self) -> None:
        for future, work in self.held:
            try:
                future.set_result(work())
            except ArithmeticError as error:
                future.set_exception(error)
        self.held.clear()


class FitRig(CoreRig):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"policy": ONLINE, **settings})
        self.executor = HeldExecutor()
        self.fit = LiveFit(self.core, self.executor)
        self.asked = 0

    def traffic(self, requests: int = 40, groups: int = 4) -> None:
        """Requests of domains that prefer other experts, released at once."""
        for member in self.core.fleet.members(WorkerRole.DECODE):
            self.report(member.info.worker_id)
        for _ in range(requests):
            first = 2 * (self.asked % groups)
            name = f"r{self.asked}"
            self.reserve(name, fake_signature((first, first + 1), tokens=30 + self.asked % 7))
            self.core.release(WorkerRole.DECODE, name, Outcome.COMPLETED)
            self.asked += 1

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes, the thread does its work, the result is taken in."""
        self.clock.advance(seconds)
        self.fit.tick(self.clock())
        while self.executor.held:
            self.executor.run()
            self.fit.tick(self.clock())

    def refits(self, result: str) -> int:
        return self.core.counters.value("eldr_refits_total", result=result)

    def owners(self) -> tuple[str, ...] | None:
        return self.core.models.find("").live.owners


def test_without_a_profile_load_decides_until_the_first_window_is_full():
    rig = FitRig()
    rig.join("d0", "d1", "d2", "d3")
    rig.traffic(8)
    rig.tick()
    assert rig.owners() is None
    assert rig.refits("window-too-small") == 1
    assert rig.core.counters.value("eldr_fallbacks_total", policy=ONLINE, fallback="no-centroids") == 8
    rig.traffic(40)
    rig.tick()
    assert rig.owners() == ("d0", "d1", "d2", "d3")
    rig.traffic(4)
    assert rig.core.counters.value("eldr_fallbacks_total", policy=ONLINE, fallback="no-centroids") == 48


def test_after_a_refit_each_domain_has_a_decoder_of_its_own():
    rig = FitRig(policy_options={"tau": 0.0})
    rig.join("d0", "d1", "d2", "d3")
    rig.traffic()
    rig.tick()
    homes = [rig.reserve(f"x{g}", fake_signature((2 * g, 2 * g + 1))) for g in range(4)]
    assert sorted(homes) == ["d0", "d1", "d2", "d3"]


def test_the_refits_follow_the_fleet():
    rig = FitRig()
    rig.join("d0", "d1", "d2")
    rig.traffic(groups=3)
    rig.tick()
    assert rig.owners() == ("d0", "d1", "d2")
    rig.join("d3")
    rig.traffic(groups=4)
    rig.core.remove("d0")
    rig.tick()
    assert rig.owners() == ("d1", "d2", "d3")


def test_decoders_that_join_and_leave_during_a_refit_do_not_disturb_it():
    rig = FitRig()
    rig.join("d0", "d1", "d2")
    rig.traffic(groups=3)
    rig.clock.advance(1.0)
    rig.fit.tick(rig.clock())
    rig.core.remove("d0")
    rig.join("d9")
    rig.executor.run()
    rig.fit.tick(rig.clock())
    assert rig.owners() == ("d0", "d1", "d2")
    assert rig.reserve("x0") in {"d1", "d2", "d9"}
    assert rig.core.counters.value("eldr_fallbacks_total", policy=ONLINE, fallback="awaiting-refit") == 1
    rig.traffic(groups=3)
    rig.tick()
    assert rig.owners() == ("d1", "d2", "d9")


def test_a_refit_that_is_due_while_one_runs_is_late_and_dropped():
    rig = FitRig()
    rig.join("d0", "d1")
    rig.traffic(groups=2)
    for _ in range(3):
        rig.clock.advance(1.0)
        rig.fit.tick(rig.clock())
    assert rig.refits("late") == 2
    assert len(rig.executor.held) == 1


def test_a_refit_sees_the_window_alone():
    rig = FitRig()
    rig.join("d0", "d1")
    rig.traffic(groups=2)
    rig.tick(seconds=6.0)
    assert rig.refits("window-too-small") == 1


def test_fewer_distinct_signatures_than_decoders_keep_the_centroids():
    rig = FitRig()
    rig.join("d0", "d1")
    for index in range(20):
        rig.reserve(f"r{index}")
    rig.tick()
    assert rig.refits("too-few-distinct") == 1
    assert rig.owners() is None


def test_a_signature_without_a_direction_never_enters_a_refit():
    """Case 3.20."""
    rig = FitRig()
    rig.join("d0", "d1")
    rig.traffic(groups=2)
    rig.reserve("zero", ZERO)
    rig.tick()
    assert rig.refits("refitted") == 1
    assert rig.core.counters.total("eldr_refit_dropped_signatures_total") == 1
    assert np.isfinite(rig.core.models.find("").live.centroids.rows).all()


def test_a_refit_for_a_profile_that_was_replaced_is_dropped():
    rig = FitRig()
    rig.join("d0", "d1")
    rig.core.models.load_profile(fake_profile())
    rig.traffic(groups=2)
    rig.tick(seconds=DRIFT_PERIOD_S)
    rig.traffic(groups=2)
    rig.clock.advance(1.0)
    rig.fit.tick(rig.clock())
    rig.core.models.load_profile(fake_profile())
    rig.executor.run()
    rig.fit.tick(rig.clock())
    assert rig.refits("superseded") == 1
    assert rig.owners() == ()


def test_a_refit_that_raises_is_counted_and_the_next_one_runs(monkeypatch):
    rig = FitRig()
    rig.join("d0", "d1")
    rig.traffic(groups=2)
    with monkeypatch.context() as patched:
        patched.setattr("eldr.router.refit.unit_vectors", lambda *_: 1 // 0)
        rig.tick()
    assert rig.refits("failed") == 1
    assert rig.owners() is None
    rig.tick()
    assert rig.refits("refitted") == 1


def test_other_policies_refit_nothing_and_keep_no_signatures():
    rig = FitRig(policy="jsq")
    rig.join("d0", "d1")
    rig.traffic()
    rig.tick()
    assert len(rig.core.models.find("").window) == 0
    assert rig.core.counters.total("eldr_refits_total") == 0
    rig.core.models.set_policy(ONLINE, {})
    rig.traffic()
    rig.tick()
    assert rig.owners() == ("d0", "d1")


def profile_of(groups: range) -> Any:
    """A profile that was fitted on some of the rig's domains, one cluster for each."""
    profile = fake_profile(len(groups))
    rows = unit_vectors(
        profile, [fake_signature((2 * g, 2 * g + 1), tokens=30 + i % 7) for i in range(50) for g in groups]
    )
    centroids = rows[: len(groups)]
    kept = baseline(rows, centroids)
    record = ClusterRecord(
        (50,) * len(groups), True, 1.0, 1, True, 10, distances=kept.distances, nearest=kept.nearest
    )
    return fake_profile(len(groups), centroids=centroids, clustering=record)


def test_drift_is_measured_and_shown_as_gauges():
    rig = FitRig(policy="jsq")
    rig.join("d0", "d1")
    assert rig.fit.drift().reason == "no profile is loaded"
    rig.core.models.load_profile(profile_of(range(2)))
    rig.traffic(20, groups=2)
    rig.tick()
    assert rig.fit.drift().reason == "20 live signatures, at least 50 are compared"
    assert rig.core.gauges.value("eldr_drift_outside_ratio", model="fake") is None
    rig.traffic(80, groups=2)
    rig.tick(seconds=DRIFT_PERIOD_S)
    assert not rig.fit.drift().drift.refit_pays
    assert rig.core.gauges.value("eldr_drift_refit_pays", model="fake") == 0.0
    assert rig.core.gauges.value("eldr_drift_occupancy_ratio", model="fake", cluster="0") == pytest.approx(
        0.5
    )
    rig.clock.advance(60.0)
    rig.traffic(100, groups=4)
    rig.tick()
    assert rig.core.gauges.value("eldr_drift_outside_ratio", model="fake") == pytest.approx(0.5)
    assert rig.core.gauges.value("eldr_drift_refit_pays", model="fake") == 1.0


def test_a_profile_without_distances_says_to_fit_again():
    rig = FitRig(policy="jsq")
    rig.join("d0")
    rig.core.models.load_profile(fake_profile())
    rig.traffic(60)
    rig.tick()
    assert "fit it again" in rig.fit.drift().reason


async def test_the_router_refits_on_its_thread_while_it_decides():
    async with served(RouterSettings(policy=ONLINE)) as (server, client):
        for name in ("d0", "d1"):
            server.core.register(fake_info(name, WorkerRole.DECODE))
        for index in range(30):
            first = 2 * (index % 2)
            await client.reserve_decode(
                signature=fake_signature((first, first + 1), tokens=30 + index % 7),
                reservation_id=f"r{index}",
            )
        await until(lambda: server.core.models.find("").live.owners == ("d0", "d1"))
        assert (await client.get_policy()).options["window_s"] == 5.0


async def test_drift_is_asked_over_the_wire():
    async with served(RouterSettings(policy="jsq")) as (server, client):
        status = await client.get_drift()
        assert (status.measured, status.reason) == (False, "no profile is loaded")
        server.core.register(fake_info("d0", WorkerRole.DECODE))
        server.core.models.load_profile(profile_of(range(2)))
        for index in range(60):
            await client.reserve_decode(signature=fake_signature((0, 1)), reservation_id=f"r{index}")
        server.live_fit._drift_due_s = 0.0
        await until(lambda: server.live_fit.drift().drift is not None, limit_s=15)
        status = await client.get_drift()
        assert status.measured
        assert status.signatures == 60
        assert status.occupancy == pytest.approx((1.0, 0.0))
        assert status.refit_pays
        assert status.rho is None

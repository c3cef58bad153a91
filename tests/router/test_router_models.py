"""Several models side by side in one router."""

import dataclasses

import grpc
import pytest
from router_rig import CoreRig, fake_profile, served, until

from eldr.calibration.profile import ProfileMismatchError
from eldr.client import NoWorkerError, RouterError
from eldr.router.errors import NoWorkerError as RouterNoWorkerError
from eldr.router.errors import RequestError, UnknownModelError
from eldr.router.fleet import FleetMismatchError
from eldr.router.models import MAX_MODELS
from eldr.router.settings import RouterSettings
from eldr.routing.contract import DecodeRequest, PolicyError
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerRole
from eldr.signature.geometry import ModelGeometry
from eldr.testing.fake_services import FakeDecodeWorker, fake_info
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
OTHER = ModelGeometry((0, 1, 2), 4, 1, "other-model")


@pytest.fixture
def rig():
    rig = CoreRig(policy="jsq")
    rig.join("d0", "d1", "p0")
    rig.join("d8", "d9", "p9", served_model="other", geometry=OTHER, block_size=32, kv_layout="bfloat16")
    return rig


def reserve(rig, rid, model):
    return rig.core.reserve_decode(DecodeRequest(rid, None), model).worker.worker_id


def test_requests_stay_within_their_model(rig):
    assert {reserve(rig, f"a{i}", "fake") for i in range(8)} == {"d0", "d1"}
    assert {reserve(rig, f"b{i}", "other") for i in range(8)} == {"d8", "d9"}
    assert rig.core.select_prefill(b"x", "fake").worker.worker_id == "p0"
    assert rig.core.select_prefill(b"x", "other").worker.worker_id == "p9"
    explained, _ = rig.core.explain_decode(DecodeRequest("", None), "other")
    assert {candidate.worker_id for candidate in explained.candidates} == {"d8", "d9"}


def test_one_release_ends_a_booking_of_any_model(rig):
    reserve(rig, "a", "fake")
    reserve(rig, "b", "other")
    assert rig.core.release(DECODE, "b", Outcome.COMPLETED)
    assert rig.core.release(DECODE, "a", Outcome.COMPLETED)
    assert sum(rig.loads().values()) == 0


def test_an_unknown_model_is_named_with_those_that_are_served(rig):
    with pytest.raises(UnknownModelError, match="model 'gpt-9' is not served; served: fake, other"):
        reserve(rig, "r", "gpt-9")
    with pytest.raises(RequestError, match="model must be named, since several are served: fake, other"):
        reserve(rig, "r", "")
    with pytest.raises(RequestError, match="model must be named"):
        rig.core.select_prefill(b"x")


def test_a_model_whose_workers_are_gone_is_known_and_has_no_worker(rig):
    rig.core.remove("d8")
    rig.core.remove("d9")
    with pytest.raises(RouterNoWorkerError, match="no decoder is registered"):
        reserve(rig, "r", "other")


def test_another_geometry_under_a_served_name_is_refused_with_both_values(rig):
    """Case 3.22, ask 17."""
    with pytest.raises(FleetMismatchError, match="worker d2 has other-model, worker d0 has fake-model"):
        rig.core.register(fake_info("d2", DECODE, geometry=OTHER))
    skewed = dataclasses.replace(FAKE_GEOMETRY, top_k=1)
    with pytest.raises(FleetMismatchError, match="top_k differs: worker d2 has 1, worker d0 has 2"):
        rig.core.register(fake_info("d2", DECODE, geometry=skewed))


def test_a_dead_fleet_does_not_keep_a_new_version_of_its_model_out():
    rig = CoreRig(policy="jsq")
    rig.join("d0", "d1")
    rig.clock.advance(31.0)
    rig.report("d1")
    info = fake_info("d2", DECODE, geometry=dataclasses.replace(FAKE_GEOMETRY, fingerprint="v2"))
    with pytest.raises(FleetMismatchError, match="worker d1 has fake-model"):
        rig.core.register(info)
    rig.clock.advance(31.0)
    assert rig.core.register(info)
    assert [status.info.worker_id for status in rig.core.workers()] == ["d2"]
    assert rig.core.models.find("fake").geometry.fingerprint == "v2"


def test_a_worker_that_changes_its_model_leaves_the_old_one(rig):
    reserve(rig, "a", "fake")
    rig.join("d0", served_model="other", geometry=OTHER, block_size=32, kv_layout="bfloat16")
    assert rig.loads()["d0"] == 0
    assert {reserve(rig, f"r{i}", "fake") for i in range(4)} == {"d1"}


def test_each_model_has_its_policy_and_its_profile(rig):
    models = rig.core.models
    models.set_policy("round-robin", {}, "other")
    assert models.find("fake").policy[0] == "jsq"
    assert models.find("other").policy[0] == "round-robin"
    models.load_profile(fake_profile())
    assert models.find("other").profile is None
    models.set_policy("locality-band", {}, "fake")
    with pytest.raises(PolicyError, match="needs a profile"):
        models.set_policy("locality-band", {})
    assert models.find("other").policy[0] == "round-robin"
    assert models.find("fake").policy[0] == "locality-band"
    decision = rig.core.reserve_decode(DecodeRequest("r", fake_signature()), "fake").decision
    assert (decision.policy, decision.fallback) == ("locality-band", "")
    with pytest.raises(ProfileMismatchError, match="'nobody'"):
        models.load_profile(fake_profile(fingerprint="nobody"))


def test_a_policy_set_for_all_holds_for_models_to_come(rig):
    rig.core.models.set_policy("p2c", {})
    rig.join("d5", served_model="third")
    assert {routing.name: routing.policy[0] for routing in rig.core.models.all()} == {
        "fake": "p2c",
        "other": "p2c",
        "third": "p2c",
    }


def test_a_model_without_a_fitting_profile_is_refused_where_the_policy_needs_one():
    rig = CoreRig(policy="jsq")
    rig.core.models.load_profile(fake_profile())
    rig.core.models.set_policy("locality-band", {})
    rig.join("d0")
    with pytest.raises(ProfileMismatchError, match="'fake-model', the fleet has 'other-model'"):
        rig.core.register(fake_info("d8", DECODE, served_model="other", geometry=OTHER))
    rig.core.models.set_policy("jsq", {})
    assert rig.core.register(fake_info("d8", DECODE, served_model="other", geometry=OTHER))


def test_what_reports_teach_is_kept_per_model(rig):
    fake, other = rig.core.models.find("fake"), rig.core.models.find("other")
    assert fake.step_times is not other.step_times
    assert fake.window is not other.window
    assert fake.predictor is not other.predictor


def test_the_number_of_models_is_bounded_and_an_idle_one_makes_room():
    rig = CoreRig(policy="jsq")
    for i in range(MAX_MODELS):
        rig.join(f"d{i}", served_model=f"m{i}")
    with pytest.raises(FleetMismatchError, match=f"'late': at most {MAX_MODELS} models"):
        rig.core.register(fake_info("d-late", DECODE, served_model="late"))
    rig.core.remove("d7")
    assert rig.core.register(fake_info("d-late", DECODE, served_model="late"))
    assert len(rig.core.models.all()) == MAX_MODELS
    with pytest.raises(UnknownModelError):
        rig.core.models.find("m7")


async def test_two_models_on_the_wire():
    a = FakeDecodeWorker("a0")
    b = FakeDecodeWorker("b0", served_model="other", geometry=OTHER)
    async with served(RouterSettings(probe_period_s=0.05), a, b) as (server, client):
        await until(lambda: [s.health for s in server.core.workers()] == ["live", "live"])
        booking = await client.reserve_decode(model="fake", signature=fake_signature())
        assert (booking.worker.worker_id, booking.decision.fallback) == ("a0", "")
        booking = await client.reserve_decode(model="other", signature=fake_signature())
        assert (booking.worker.worker_id, booking.decision.fallback) == ("b0", "signature-mismatch")
        with pytest.raises(RouterError, match="model must be named") as caught:
            await client.reserve_decode()
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(RouterError, match="'gpt-9' is not served") as caught:
            await client.select_prefill(model="gpt-9")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(NoWorkerError):
            await client.select_prefill(model="other")
        await client.set_policy("jsq", model="other")
        assert (await client.get_policy("other")).policy == "jsq"
        assert (await client.get_policy("fake")).policy == "union-cost"
        assert not (await client.get_profile("other")).loaded
        assert not (await client.get_drift("other")).measured

"""`eldr inspect --live`: the drift that a running router measures."""

import json

import numpy as np
import pytest
from served_router import eldr, served_router

from eldr.calibration.drift import baseline
from eldr.calibration.fit_record import ClusterRecord, Provenance
from eldr.calibration.live import unit_vectors
from eldr.calibration.profile import Profile
from eldr.router.refit import LiveFit
from eldr.routing.contract import DecodeRequest
from eldr.rpc.worker_info import WorkerRole
from eldr.signature.geometry import ModelGeometry
from eldr.testing.fake_services import fake_info
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature


@pytest.fixture
def profile(tmp_path) -> Profile:
    def made(centroids, **kept):
        return Profile(
            fingerprint=FAKE_GEOMETRY.fingerprint,
            moe_layers=FAKE_GEOMETRY.moe_layers,
            experts=FAKE_GEOMETRY.experts,
            top_k=FAKE_GEOMETRY.top_k,
            transform="count",
            idf=np.ones(FAKE_GEOMETRY.shape, np.float32),
            layer_mask=(0, 1),
            centroids=centroids,
            quality=(),
            clustering=ClusterRecord((50, 50), True, 1.0, 1, True, 10, **kept),
            provenance=Provenance("ab12", 100, "2026-01-01T00:00:00+00:00", "0", 0),
        )

    start = np.eye(2, FAKE_GEOMETRY.layers * FAKE_GEOMETRY.experts, dtype=np.float32)
    rows = unit_vectors(
        made(start), [fake_signature((2 * (i % 2), 2 * (i % 2) + 1), tokens=30 + i % 7) for i in range(100)]
    )
    kept = baseline(rows, rows[:2])
    profile = made(rows[:2], distances=kept.distances, nearest=kept.nearest)
    profile.save(tmp_path / "live.profile")
    return profile


async def test_live_drift_is_shown_in_words_and_as_json(profile, tmp_path):
    path = tmp_path / "live.profile"
    async with served_router(policy="jsq") as (server, address):
        none = await eldr("inspect", path, "--live", address)
        assert none.code == 1
        assert "has no profile" in none.err
        server.core.register(fake_info("d0", WorkerRole.DECODE))
        server.core.models.load_profile(profile)
        # A second model beside it: the profile's fingerprint says which is meant.
        other = ModelGeometry((0, 1), 4, 1, "another-model")
        server.core.register(fake_info("a0", WorkerRole.DECODE, served_model="another", geometry=other))
        for index in range(60):
            server.core.reserve_decode(DecodeRequest(f"r{index}", fake_signature((4, 5))), "fake")
        fit: LiveFit = server.live_fit
        while fit.drift("fake").drift is None:
            fit.tick(server.core.now_s())
        shown = await eldr("inspect", path, "--live", address)
        assert shown.code == 0, shown.err
        assert "live: a refit pays: 100% of the signatures lie outside the calibration" in shown.out
        assert "rho unknown here, a router hears no decode counts" in shown.out
        as_json = json.loads((await eldr("inspect", path, "--live", address, "--json")).out)
        assert as_json["live"]["signatures"] == 60


async def test_a_router_with_another_profile_is_refused_with_both(profile, tmp_path):
    path = tmp_path / "live.profile"
    async with served_router(policy="jsq") as (server, address):
        server.core.models.load_profile(profile)
        other = Profile.load(path)
        object.__setattr__(other, "provenance", Provenance("cd34", 7, "2026-01-01T00:00:00+00:00", "0", 0))
        other.save(path)
        refused = await eldr("inspect", path, "--live", address)
        assert refused.code == 1
        assert "has another profile" in refused.err
        assert "ab12" in refused.err
        assert "cd34" in refused.err


async def test_no_router_ends_with_what_to_do(profile, tmp_path):
    refused = await eldr("inspect", tmp_path / "live.profile", "--live", "127.0.0.1:1")
    assert refused.code == 1
    assert "no router answers at 127.0.0.1:1" in refused.err

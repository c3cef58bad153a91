import dataclasses

import numpy as np
import pytest

from eldr.calibration.counts import Counts, tally
from eldr.simulator.world import RecordedWorld, SyntheticWorld, WorldShape, inclusion

SMALL = WorldShape(layers=3, experts=16, top_k=2, subdomains=2)


def test_inclusion_probabilities_sum_to_top_k_and_follow_the_logits():
    logits = np.random.default_rng(0).normal(0, 2, (50, 64)).astype(np.float32)
    chosen = inclusion(logits, 8)
    np.testing.assert_allclose(chosen.sum(axis=-1), 8, rtol=0.02)
    assert chosen.min() >= 0
    assert chosen.max() <= 1
    assert np.array_equal(np.argsort(logits[0]), np.argsort(chosen[0], kind="stable"))


@pytest.mark.parametrize("median", [1, 7, 200])
def test_a_drawn_signature_has_top_k_picks_per_token_and_layer(median):
    shape = WorldShape(layers=3, experts=16, top_k=2, subdomains=2, prompt_median=median)
    world = SyntheticWorld(shape, ["a", "b"])
    for drawn in world.draw(["a", "b"] * 30, np.random.default_rng(1)):
        counts = np.asarray(drawn.signature.counts)
        assert (counts.sum(axis=1) == 2 * drawn.signature.tokens).all()
        assert counts.max() <= drawn.signature.tokens


def test_a_domain_is_the_same_beside_other_domains():
    alone = SyntheticWorld(SMALL, ["a"]).draw(["a"] * 3, np.random.default_rng(2))
    beside = SyntheticWorld(SMALL, ["a", "b"]).draw(["a"] * 3, np.random.default_rng(2))
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one.shares, other.shares)


def test_requests_of_one_domain_share_more_experts_than_those_of_two():
    world = SyntheticWorld(WorldShape(), ["a", "b"])
    drawn = world.draw(["a"] * 40 + ["b"] * 40, np.random.default_rng(3))

    def union(prompts):
        return (1 - np.prod([1 - prompt.shares for prompt in prompts], axis=0)).sum(axis=1).mean()

    assert union(drawn[:16]) < 0.95 * union(drawn[:8] + drawn[40:48])


def recorded(requests=12, steps=200):
    """Independent picks of two disjoint experts each, so that expected unions are right on average."""
    rng = np.random.default_rng(4)
    ids = np.argsort(rng.random((requests, steps, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    return Counts(
        ids=tuple(map(str, range(requests))),
        fingerprint="",
        top_k=2,
        moe_layers=(0, 1),
        prompt_len=np.full(requests, steps),
        prefill_counts=tally(ids, np.full(requests, steps), 8),
        decode_counts=tally(ids, np.full(requests, steps), 8),
        domains=("x", "y") * (requests // 2),
        decode_ids=ids,
        decode_len=np.full(requests, steps),
    )


def test_recorded_shares_are_decode_counts_over_tokens_and_routes_are_kept_on_demand():
    counts = recorded()
    with_routes, without = RecordedWorld(counts, True), RecordedWorld(counts, False)
    first = with_routes.prompt(0, "x")
    np.testing.assert_allclose(first.shares, counts.decode_counts[0] / 200, rtol=1e-6)
    np.testing.assert_array_equal(first.routes, counts.decode_ids[0])
    assert without.prompt(0, "x").routes is None
    assert with_routes.domains == ("x", "y")


def test_requests_that_calibrate_are_no_traffic():
    world = RecordedWorld(recorded(), True)
    traffic, calibration = (
        {prompt.signature.counts.tobytes() for prompt in part.draw(["x", "y"] * 50, np.random.default_rng(5))}
        for part in (world, world.calibration)
    )
    assert traffic
    assert calibration
    assert not traffic & calibration


def test_a_domain_with_one_request_cannot_be_split():
    counts = recorded()
    alone = dataclasses.replace(counts, domains=("z", *counts.domains[1:]))
    with pytest.raises(ValueError, match="domain z has one request"):
        RecordedWorld(alone, False)


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("top_k", 16), ("domain", -1.0), ("prompt_median", 0.5)]
)
def test_a_world_shape_out_of_range_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        WorldShape(**({"layers": 3, "experts": 16, "top_k": 2} | {field: value}))

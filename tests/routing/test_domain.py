import copy
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_fleets import equal_fleet, request, view

from eldr.routing.domain import Domain, pool_sizes


def test_pools_follow_the_mix_by_largest_remainder():
    assert pool_sizes({"a": 60, "b": 30, "c": 10}, 6) == {"a": 3, "b": 2, "c": 1}
    assert pool_sizes({"a": 31, "b": 24, "c": 23.5, "d": 21.5}, 16) == {"a": 5, "b": 4, "c": 4, "d": 3}


def test_equal_pools_ignore_the_mix():
    assert pool_sizes({"a": 90, "b": 10}, 5, equal=True) == {"a": 3, "b": 2}


@given(st.dictionaries(st.text(max_size=3), st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(8, 64))
def test_every_decoder_has_a_pool_and_every_pool_a_decoder(shares, decoders):
    sizes = pool_sizes(shares, decoders)
    assert sum(sizes.values()) == decoders
    assert min(sizes.values()) >= 1


def test_more_labels_than_decoders_are_refused():
    with pytest.raises(ValueError, match="at least the 3 labels, got 2"):
        pool_sizes({"a": 1, "b": 1, "c": 1}, 2)


def test_a_label_keeps_to_its_pool():
    policy, fleet = Domain({"renew_every": 10}), equal_fleet(4)
    placed = Counter()
    for i in range(200):
        label = "abb"[i % 3]
        decision = policy.select(request(f"r{i}", domain=label), fleet)
        assert decision.fallback == ""
        if i > 30:
            placed[label, decision.worker_id] += 1
    assert {worker for label, worker in placed if label == "a"} == {"d0"}
    assert {worker for label, worker in placed if label == "b"} == {"d1", "d2", "d3"}


def test_the_least_loaded_of_the_pool_is_picked():
    policy = Domain()
    fleet = (view("d0", 5), view("d1", 3), view("d2", 0), view("d3", 9))
    policy.select(request("r0", domain="a"), fleet)
    policy.select(request("r1", domain="b"), fleet)
    assert policy.select(request("r2", domain="a"), fleet).worker_id == "d1"
    assert policy.select(request("r3", domain="b"), fleet).worker_id == "d2"


def test_without_a_label_load_decides_and_the_fallback_is_named():
    decision = Domain().select(request(), (view("d0", 5), view("d1", 3)))
    assert (decision.worker_id, decision.fallback) == ("d1", "no-domain")


def test_more_labels_than_decoders_is_a_named_fallback():
    policy, fleet = Domain(), (view("d0", 5), view("d1", 3))
    for label in "ab":
        policy.select(request(domain=label), fleet)
    decision = policy.select(request(domain="c"), fleet)
    assert (decision.worker_id, decision.fallback) == ("d1", "more-domains-than-decoders")


def test_a_dry_run_counts_no_label():
    policy, fleet = Domain(), equal_fleet(4)
    policy.select(request("r0", domain="a"), fleet)
    copy.copy(policy).select(request("r1", domain="b"), fleet)
    assert policy.select(request("r2", domain="a"), fleet).reason.startswith("fewest in flight (0) of 4")


def test_labels_are_bounded():
    policy = Domain()
    for i in range(Domain.MAX_DOMAINS + 5):
        policy.select(request(domain=f"x{i}"), equal_fleet(2))
    assert len(policy._shares) == Domain.MAX_DOMAINS

import numpy as np
import pytest
from policy_fleets import TableLive, TableLocality, equal_fleet, request, view

from eldr.routing.contract import PolicyError
from eldr.routing.locality_band import LocalityBand
from eldr.routing.locality_band_online import LocalityBandOnline
from eldr.routing.registry import Sources, make_policy


def band(*similarities, owners=(), **options):
    return LocalityBandOnline(TableLive(*similarities, owners=owners), options)


def test_a_decoder_has_the_similarity_of_the_centroid_it_owns_wherever_that_stands():
    policy = band(0.2, 0.9, 0.1, owners=("d2", "d0", "d1"), tau=0.0)
    decision = policy.select(request(), equal_fleet(3))
    assert (decision.worker_id, decision.fallback) == ("d0", "")
    assert {c.worker_id: round(1 - c.score, 3) for c in decision.candidates} == {
        "d0": 0.9,
        "d1": 0.1,
        "d2": 0.2,
    }


def test_before_the_first_refit_it_decides_as_the_static_band_does():
    fleet = (view("d0", 6), view("d1", 4), view("d2", 3))
    for similarities in ((0.9, 0.85, 0.5), (0.9, 0.1), (0.1, 0.2, 0.3, 0.9, 0.4)):
        static = LocalityBand(TableLocality(*similarities)).select(request(), fleet)
        online = band(*similarities).select(request(), fleet)
        assert (online.worker_id, online.reason) == (static.worker_id, static.reason)


def test_without_centroids_load_decides_and_the_fallback_says_so():
    decision = band(owners=None).select(request(), (view("d0", 3), view("d1", 1)))
    assert (decision.worker_id, decision.fallback) == ("d1", "no-centroids")


def test_a_decoder_that_joined_shares_the_centroid_at_its_position_until_the_next_refit():
    """d2 stands at position 2, 2 % 2 = 0: it takes turns with the owner of centroid 0."""
    policy = band(0.9, 0.1, owners=("d0", "d1"), tau=0.0)
    fleet = (view("d0", 5), view("d1", 5), view("d2", 1))
    decision = policy.select(request(), fleet)
    assert (decision.worker_id, decision.fallback) == ("d2", "awaiting-refit")


def test_the_centroid_of_a_decoder_that_left_is_nobodys():
    policy = band(0.9, 0.2, 0.4, owners=("gone", "d0", "d1"), tau=0.0)
    decision = policy.select(request(), equal_fleet(2))
    assert (decision.worker_id, decision.fallback) == ("d1", "")


def test_a_similarity_that_is_not_finite_never_wins():
    decision = band(np.nan, 0.1, owners=("d0", "d1"), tau=0.0).select(request(), equal_fleet(2))
    assert (decision.worker_id, decision.fallback) == ("d1", "non-finite")
    nothing = band(np.nan, np.nan, owners=("d0", "d1")).select(request(), equal_fleet(2))
    assert nothing.fallback == "non-finite"


def test_a_signature_without_a_vector_falls_back_to_load():
    decision = band().select(request(), (view("d0", 3), view("d1", 1)))
    assert (decision.worker_id, decision.fallback) == ("d1", "unusable-signature")


def test_without_live_centroids_the_policy_is_refused():
    with pytest.raises(PolicyError, match="needs live centroids"):
        make_policy("locality-band-online", {}, Sources())


@pytest.mark.parametrize("options", [{"window_s": 0.1}, {"interval_s": 0.0}, {"rows_per_decoder": 0}])
def test_refit_options_have_ranges(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        make_policy("locality-band-online", options, Sources(live=TableLive(0.5)))

import numpy as np
import pytest
from policy_fleets import TableLocality, equal_fleet, place, request, view

from eldr.routing.locality_band import LocalityBand


def band(*similarities, **options):
    return LocalityBand(TableLocality(*similarities), options)


def test_the_least_loaded_within_tau_of_the_best_is_picked():
    fleet = (view("d0", 6), view("d1", 4), view("d2", 3))
    assert band(0.90, 0.85, 0.50).select(request(), fleet).worker_id == "d1"
    assert band(0.90, 0.85, 0.81).select(request(), fleet).worker_id == "d2"


def test_with_one_decoder_in_the_band_the_best_two_are_taken():
    fleet = (view("d0", 5), view("d1", 4), view("d2", 3))
    assert band(0.9, 0.5, 0.1).select(request(), fleet).worker_id == "d1"


def test_tau_zero_is_locality_alone():
    fleet = (view("d0", 5), view("d1", 4), view("d2", 3))
    assert band(0.9, 0.5, 0.1, tau=0.0).select(request(), fleet).worker_id == "d0"


def test_the_widest_band_is_load_alone():
    fleet = (view("d0", 5), view("d1", 4), view("d2", 3))
    assert band(0.9, 0.5, -0.1, tau=2.0).select(request(), fleet).worker_id == "d2"


def test_a_tie_in_load_goes_to_the_more_similar():
    assert band(0.85, 0.90, 0.1).select(request(), equal_fleet(3)).worker_id == "d1"


def test_a_decoder_owns_every_centroid_of_its_class():
    """K = 5, D = 2: d0 owns 0, 2, 4 and d1 owns 1, 3."""
    decision = band(0.1, 0.2, 0.3, 0.9, 0.4, tau=0.0).select(request(), equal_fleet(2))
    assert decision.worker_id == "d1"
    similar = {c.worker_id: 1 - c.score for c in decision.candidates}
    assert similar == pytest.approx({"d0": 0.4, "d1": 0.9})


def test_more_decoders_than_centroids_share_them():
    """K = 2, D = 4: d0 and d2 own centroid 0, d1 and d3 centroid 1."""
    placed, _ = place(
        band(0.9, 0.1, max_load_ratio=0.0), equal_fleet(4), [request(f"r{i}") for i in range(20)]
    )
    assert placed == {"d0": 10, "d1": 0, "d2": 10, "d3": 0}


def test_a_removed_decoder_is_not_chosen_for_its_centroid():
    """Case 3.11: W has the best centroid; remove W; route."""
    policy = band(0.1, 0.2, 0.9, tau=0.0)
    assert policy.select(request(), equal_fleet(3)).worker_id == "d2"
    assert policy.select(request(), equal_fleet(2)).worker_id in {"d0", "d1"}


def test_a_dead_decoder_leaves_its_centroid_to_the_next_best():
    """Case 3.11: candidates come from the live set, affinity is looked up afterwards."""
    fleet = (view("d0"), view("d1"), view("d2", ineligible="dead: silent 40.0 s"))
    assert band(0.1, 0.2, 0.9, tau=0.0).select(request(), fleet).worker_id == "d1"


def test_over_the_load_bound_the_next_similar_decoder_is_taken_and_counted():
    """Case 3.6: affinity is capped by load; the knob is max_load_ratio."""
    fleet = (view("d0", 20), view("d1", 18), view("d2", 4), view("d3", 4))
    decision = band(0.9, 0.85, 0.2, 0.4, tau=0.1).select(request(), fleet)
    assert decision.worker_id == "d3"
    assert decision.fallback == "load-bound"
    unbounded = band(0.9, 0.85, 0.2, 0.4, tau=0.1, max_load_ratio=0.0).select(request(), fleet)
    assert unbounded.worker_id == "d1"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place_of_bad", [0, 1, 2])
def test_a_similarity_that_is_not_finite_never_wins(bad, place_of_bad):
    """Case 3.20: one worker with a zero centroid; independent of the order of the workers."""
    similarities = [0.3, 0.3, 0.3]
    similarities[place_of_bad] = bad
    decision = band(*similarities, tau=0.0).select(request(), equal_fleet(3))
    assert decision.worker_id != f"d{place_of_bad}"
    assert decision.fallback == "non-finite"


def test_no_finite_similarity_falls_back_to_load():
    fleet = (view("d0", 3), view("d1", 1))
    decision = band(np.nan, np.nan).select(request(), fleet)
    assert (decision.worker_id, decision.fallback) == ("d1", "non-finite")


def test_a_signature_without_a_vector_falls_back_to_load():
    """Case 3.20: an all-zero signature has no direction."""
    fleet = (view("d0", 3), view("d1", 1))
    decision = band().select(request(), fleet)
    assert (decision.worker_id, decision.fallback) == ("d1", "unusable-signature")

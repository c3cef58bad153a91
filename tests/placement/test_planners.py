"""Planners: every rule of a map holds, small cases are exact, and what was measured is what is expected."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.placement import PLANNERS, Demand, Geometry, PlacementError, PlanSettings, plan
from eldr.placement.replay import use_fewest_activated


def steps_of(rng: np.random.Generator, steps: int, layers: int, experts: int) -> np.ndarray:
    """Steps in which experts of a group tend to be touched together."""
    group = rng.integers(4, size=(layers, experts))
    fires = rng.random((steps, layers, 4)) < 0.5
    chance = np.where(
        np.take_along_axis(fires, np.broadcast_to(group, (steps, layers, experts)), axis=2), 0.8, 0.2
    )
    return rng.random((steps, layers, experts)) < chance


@given(
    planner=st.sampled_from(sorted(PLANNERS)),
    nodes=st.sampled_from([1, 2]),
    per_node=st.integers(1, 3),
    experts=st.sampled_from([4, 6, 12]),
    extra=st.integers(0, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_map_obeys_every_rule(
    planner: str, nodes: int, per_node: int, experts: int, extra: int, seed: int
) -> None:
    ranks = nodes * per_node
    room = min(-(-experts // ranks) + extra, experts // nodes)
    geometry = Geometry(experts, ranks, room * ranks, nodes)
    demand = Demand.of_steps(steps_of(np.random.default_rng(seed), 40, 2, experts))
    result = plan(demand, geometry, PlanSettings(planner))
    geometry.check_map(result.maps, 2)
    again = plan(demand, geometry, PlanSettings(planner))
    np.testing.assert_array_equal(result.maps, again.maps)
    assert (result.expected_max >= result.bound - 1e-9).all()
    rerun = plan(demand, geometry, PlanSettings(planner), result.maps)
    assert rerun.moved_experts.sum() == 0


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(4, 2, 4), (4, 2, 6), (6, 3, 6)])
def test_small_cases_are_exact_against_brute_force(experts: int, ranks: int, slots: int) -> None:
    geometry = Geometry(experts, ranks, slots)
    steps = steps_of(np.random.default_rng(3), 30, 1, experts)
    result = plan(Demand.of_steps(steps), geometry)
    rows = {
        row
        for filling in permutations([*range(experts), *range(experts)], slots)
        if len(set(filling)) == experts
        and all(
            list(part) == sorted(set(part))
            for part in (filling[at : at + slots // ranks] for at in range(0, slots, slots // ranks))
        )
        for row in [filling]
    }
    maps = np.array(sorted(rows))
    activated = np.broadcast_to(steps[:, 0].T, (len(maps), experts, len(steps)))
    best = use_fewest_activated(activated, maps, geometry).largest.min()
    assert result.expected_max[0] == pytest.approx(best)


def test_experts_that_fire_together_are_kept_apart() -> None:
    rng = np.random.default_rng(0)
    together = rng.random((400, 1, 8)) < 0.5
    steps = np.repeat(together, 2, axis=2)
    result = plan(Demand.of_steps(steps), Geometry(16, 2, 16))
    assert result.expected_max[0] == pytest.approx(result.bound[0])
    counts = Demand(
        steps.mean(axis=0),
        together=np.einsum("sle,slf->lef", steps.astype(float), steps.astype(float)) / len(steps),
    )
    assert plan(counts, Geometry(16, 2, 16)).expected_max[0] < result.present_max[0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_redundant_slots_the_plan_is_never_above_linear_on_what_it_saw(ranks: int) -> None:
    steps = steps_of(np.random.default_rng(1), 200, 3, 16)
    result = plan(Demand.of_steps(steps), Geometry(16, ranks, 16))
    assert (result.expected_max <= result.present_max + 1e-9).all()


@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "nearest"), [(256, 3, 256, 258), (5, 4, 6, 8), (4, 8, 4, 8)]
)
def test_sizes_that_do_not_divide_name_the_nearest_valid_count(
    experts: int, ranks: int, slots: int, nearest: int
) -> None:
    """Case 6.1."""
    with pytest.raises(PlacementError, match=rf"is {nearest} \({nearest - experts} redundant"):
        Geometry(experts, ranks, slots)
    Geometry(experts, ranks, nearest)


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_a_layer_without_load_keeps_its_map(planner: str) -> None:
    """Case 6.3: zero loads, one zero layer among others, dead experts, too few steps."""
    rng = np.random.default_rng(0)
    geometry = Geometry(8, 4, 12)
    present = plan(Demand(rng.random((2, 8))), geometry, PlanSettings("activation-balance")).maps
    hits = rng.random((2, 8))
    hits[1] = 0
    hits[0, 5:] = 0
    result = plan(Demand(hits), geometry, PlanSettings(planner), present)
    np.testing.assert_array_equal(result.maps[1], present[1])
    assert result.kept == (1,)
    if planner != "linear":
        assert (np.bincount(plan(Demand(hits), geometry, PlanSettings(planner)).maps[0])[5:] == 1).all()
    few = plan(Demand(hits, observed_steps=9), geometry, PlanSettings(planner, min_steps=10), present)
    np.testing.assert_array_equal(few.maps, present)


@pytest.mark.parametrize("bad", [np.inf, np.nan, -5.0, 1e300])
def test_values_that_are_no_shares_are_refused_by_name(bad: float) -> None:
    """Case 6.4."""
    hits = np.full((2, 4), 0.5)
    hits[1, 2] = bad
    with pytest.raises(PlacementError, match="hits must be 0 to 1: layer 1, expert 2"):
        Demand(hits)
    with pytest.raises(PlacementError, match="tokens must be finite"):
        Demand(np.full((2, 4), 0.5), tokens=np.where(np.isfinite(hits) & (hits > 1), np.inf, hits))


def test_wrong_layers_and_unequal_slots_are_refused_with_the_layer_list() -> None:
    """Case 6.7."""
    geometry = Geometry(4, 2, 4)
    row = [0, 1, 2, 3]
    with pytest.raises(PlacementError, match=r"has 3 layers, the model has 4: \[1, 2, 3, 7\]"):
        geometry.check_map([row] * 3, [1, 2, 3, 7])
    with pytest.raises(PlacementError, match=r"4 slots; layers \[7\]"):
        geometry.check_map([row, row, row, [*row, 0, 1]], [1, 2, 3, 7])
    with pytest.raises(PlacementError, match=r"experts needs a slot; layers \[2\]"):
        geometry.check_map([row, [0, 1, 2, 0]], [1, 2])
    with pytest.raises(PlacementError, match=r"twice; layers \[1\]"):
        Geometry(4, 2, 6).check_map([[0, 0, 1, 2, 3, 1]], [1])


def test_a_gain_that_does_not_pay_for_its_moves_leaves_the_map() -> None:
    demand = Demand.of_steps(steps_of(np.random.default_rng(5), 200, 2, 16))
    geometry = Geometry(16, 4, 20)
    present = plan(demand, geometry, PlanSettings("linear")).maps
    free = plan(demand, geometry, PlanSettings(expert_bytes=10), present)
    dear = plan(demand, geometry, PlanSettings(move_cost=5.0, expert_bytes=10), present)
    assert free.moved_bytes == 10 * free.moved_experts.sum() > 0
    assert dear.moved_bytes == 0
    np.testing.assert_array_equal(dear.maps, present)

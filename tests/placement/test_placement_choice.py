"""The replica choice: the reference for one step, and the form for many steps at once."""

import numpy as np
import pytest

from eldr.placement import (
    Demand,
    Geometry,
    PlanSettings,
    Replicas,
    choose_by_hash,
    choose_fewest_activated,
    plan,
)
from eldr.placement.replay import activated_of, even_split, use_by_hash, use_fewest_activated

GEOMETRY = Geometry(12, 4, 20)


def picks(steps: int, tokens: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((steps, tokens, 2, 12)).argsort(axis=3)
    return order[..., :3]


def maps_of(planner: str) -> np.ndarray:
    hits = np.random.default_rng(1).random((2, 12))
    return plan(Demand(hits), GEOMETRY, PlanSettings(planner)).maps


@pytest.mark.parametrize("planner", ["linear", "token-balance", "co-activation"])
def test_many_steps_at_once_equal_the_reference_step_by_step(planner: str) -> None:
    maps, ids = maps_of(planner), picks(40, 5)
    activated = activated_of(ids, 12)
    fewest, hashed = use_fewest_activated(activated, maps, GEOMETRY), use_by_hash(ids, maps, GEOMETRY)
    for layer, row in enumerate(maps):
        replicas = Replicas.of(row, 12)
        for step in range(40):
            for use, slots in (
                (fewest, choose_fewest_activated(ids[step, :, layer], replicas, GEOMETRY)),
                (hashed, choose_by_hash(ids[step, :, layer], replicas)),
            ):
                np.testing.assert_array_equal(np.flatnonzero(use.used[layer, :, step]), np.unique(slots))
                np.testing.assert_array_equal(row[slots], ids[step, :, layer])


def test_each_activated_expert_uses_exactly_one_replica() -> None:
    """Case 6.5: whatever the order of the tokens, the choice is the same on every rank."""
    maps, ids = maps_of("co-activation"), picks(1, 6)[0, :, 0]
    replicas = Replicas.of(maps[0], 12)
    slots = choose_fewest_activated(ids, replicas, GEOMETRY)
    assert len(np.unique(slots)) == len(np.unique(ids))
    np.testing.assert_array_equal(choose_fewest_activated(ids[::-1], replicas, GEOMETRY), slots[::-1])


def test_the_choice_lies_between_the_even_split_and_the_choice_by_hash() -> None:
    maps, ids = maps_of("token-balance"), picks(100, 5)
    activated = activated_of(ids, 12)
    fewest = use_fewest_activated(activated, maps, GEOMETRY).largest
    assert (even_split(activated, 4) <= fewest + 1e-9).all()
    assert (fewest < use_by_hash(ids, maps, GEOMETRY).largest).all()


def test_padding_gets_no_slot_and_counts_nowhere() -> None:
    replicas = Replicas.of(maps_of("linear")[0], 12)
    ids = np.array([[0, 5, -1], [-1, -1, -1], [12, 7, 255]])
    for slots in (choose_fewest_activated(ids, replicas, GEOMETRY), choose_by_hash(ids, replicas)):
        np.testing.assert_array_equal(slots < 0, (ids < 0) | (ids > 11))

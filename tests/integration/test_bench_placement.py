"""The arithmetic of the placement benchmark."""

import numpy as np
import pytest

from integration.bench.placement import Trace, judged, measure


def test_every_planner_is_replayed_under_both_choices_and_judged() -> None:
    rng = np.random.default_rng(0)
    requests = [rng.random((9, 2, 8)).argsort(axis=2)[..., :2].astype(np.uint8) for _ in range(12)]
    trace = Trace(8, requests, ["a", "b"] * 6)
    cells = [cell for mix in ("mixed", "pure") for cell in measure("t", trace, 4, mix, 4, 24)]
    assert len(cells) == 2 * 2 * 4 * 2
    keys = {"trace", "mix", "batch", "ranks", "redundant", "planner", "replica_choice", "replayed_max"}
    assert all(set(cell) == keys | {"even_split", "seconds"} for cell in cells)
    assert all(cell["replayed_max"] >= cell["even_split"] - 1e-9 for cell in cells)
    for cell in cells:
        cell["replayed_max"] = 4.0 if cell["replica_choice"] == "fewest-activated" else 5.0
        cell["even_split"] = 2.0
    goals = judged(cells)
    assert goals["against_token_balance_hash"]["worst"] == pytest.approx(-20)
    assert goals["against_linear"]["cells_missing_5"] == 0
    assert goals["above_even_split"]["mean"] == pytest.approx(100)

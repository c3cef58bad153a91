from pathlib import Path

import numpy as np
import pytest
from small_worlds import prompt, tiny

from eldr.routing.registry import POLICIES
from eldr.simulator.oracle import OracleShares
from eldr.simulator.runs import requests_of, simulate, world_of
from eldr.simulator.scenario import ORACLE


def drawn(scenario):
    return requests_of(scenario, world_of(scenario, Path(".")), 0)


def test_the_oracle_knows_the_shares_of_revealed_prompts_only():
    known, other = prompt((0, 1)), prompt((2, 3))
    oracle = OracleShares()
    oracle.reveal([known])
    assert np.array_equal(oracle.shares(known.signature), known.shares.reshape(-1))
    with pytest.raises(KeyError):
        oracle.shares(other.signature)


def test_no_live_router_has_the_oracle():
    assert ORACLE not in POLICIES


def test_with_signatures_that_say_nothing_only_the_oracle_finds_the_locality():
    shape = {"layers": 3, "experts": 16, "top_k": 2, "subdomains": 2, "prefill": 6.0}
    scenario = tiny(duration_s=12, rate=60, output={"tokens": 100}, world={"shape": shape})
    requests = drawn(scenario)
    unions = {name: simulate(scenario, requests, name, 0).union for name in ("union-cost", ORACLE, "jsq")}
    assert unions[ORACLE] < unions["union-cost"] - 0.1
    assert unions["jsq"] - unions[ORACLE] > 2 * (unions["jsq"] - unions["union-cost"])


def test_the_oracle_changes_only_union_cost():
    requests = drawn(tiny())
    assert simulate(tiny(), requests, ORACLE, 0) == simulate(tiny(), requests, ORACLE, 0)
    assert tiny(policies=[ORACLE]).policies == (ORACLE,)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.5, 0.35, 0.65), (1.0, 1, 1)])
def test_the_router_is_told_the_decode_counts_of_a_share_of_the_requests(monkeypatch, share, low, high):
    told = []
    monkeypatch.setattr(
        "eldr.routing.predictor.Predictor.observe",
        lambda self, signature, counts, tokens: told.append(tokens),
    )
    scenario = tiny(fleet={"prefill": 2, "decode": 4, "learn_share": share})
    requests = drawn(scenario)
    simulate(scenario, requests, "union-cost", 0)
    assert low * len(requests.arrivals) <= len(told) <= high * len(requests.arrivals)
    assert set(told) <= {40}


def test_a_run_tells_how_far_the_models_are_off():
    requests = drawn(tiny())
    plain, oracle = (simulate(tiny(), requests, name, 0) for name in ("union-cost", ORACLE))
    assert 0.05 < plain.share_error < 0.5
    assert oracle.share_error == 0
    assert 0 < plain.step_time_error < 0.05

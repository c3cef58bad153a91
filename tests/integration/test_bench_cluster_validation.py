"""integration/bench/cluster_validation.py: what it takes from a demo's result, and what it compares."""

import numpy as np
import pytest

from eldr.calibration.counts import Counts, tally
from eldr.simulator.world import RecordedWorld
from integration.bench.cluster_validation import (
    ResultError,
    Row,
    compared,
    requests_of,
    step_fit,
    workload_of,
)

WORKLOAD = {
    "prefill": 1,
    "decode": 2,
    "requests": 24,
    "in_flight": 8,
    "output_tokens": 6,
    "prompt_tokens": 12,
}
FIGURES = {"tpot_ms": {"p50": 20.0}, "ttft_ms": {"p50": 30.0}, "union_mean": 7.0}


def samples(count=30):
    rng = np.random.default_rng(0)
    drawn = [(float(rng.integers(2, 9)), float(rng.uniform(4, 12))) for _ in range(count)]
    return [
        {"decoder": "d", "steps": 5, "batch": n, "union": u, "step_ms": 3.0 + 0.5 * n + u} for n, u in drawn
    ]


def result(**changes):
    return {
        "workload": WORKLOAD,
        "policies": {"round-robin": FIGURES, "union-cost": FIGURES},
        "step_samples": {"round-robin": samples()},
        **changes,
    }


def counts():
    rng = np.random.default_rng(1)
    requests, prompt, steps, layers, experts, top_k = 12, 12, 8, 2, 16, 2

    def picks(tokens):
        keys = rng.random((requests, tokens, layers, experts))
        return np.argsort(keys, axis=-1)[..., :top_k].astype(np.uint8)

    before, after = picks(prompt), picks(steps)
    lengths, decoded = np.full(requests, prompt), np.full(requests, steps)
    return Counts(
        ids=tuple(f"r{i}" for i in range(requests)),
        fingerprint="",
        top_k=top_k,
        moe_layers=(0, 1),
        prompt_len=lengths,
        prefill_counts=tally(before, lengths, experts),
        decode_counts=tally(after, decoded, experts),
        domains=("code", "law") * (requests // 2),
        decode_ids=after,
        decode_len=decoded,
    )


def test_the_step_time_model_is_that_of_the_runs_own_samples():
    model = step_fit(result()).model
    assert (model.base_ms, model.per_request_ms, model.per_expert_ms) == pytest.approx((3.0, 0.5, 1.0))


def test_a_result_of_an_older_demo_is_refused_with_what_to_do():
    with pytest.raises(ResultError, match="no workload"):
        workload_of({"policies": {}})
    with pytest.raises(ResultError, match="0 step samples"):
        step_fit({"policies": {}})
    with pytest.raises(ResultError, match="3 step samples"):
        step_fit(result(step_samples={"jsq": samples(3)}))


def test_requests_come_of_all_domains_in_equal_parts():
    drawn = requests_of(RecordedWorld(counts(), routes=True), ["code", "law"], workload_of(result()), 0)
    domains = [arrival.prompt.domain for arrival in drawn.arrivals]
    assert (domains.count("code"), domains.count("law")) == (12, 12)
    assert {arrival.output_tokens for arrival in drawn.arrivals} == {6}


def test_every_policy_of_the_run_is_compared():
    _, rows = compared(result(), counts(), ["code", "law"], [0])
    assert [row.policy for row in rows] == ["round-robin", "union-cost"]
    for row in rows:
        assert row.tpot_ratio == pytest.approx(row.tpot_p50_simulated_ms / 20.0)
        assert row.union_ratio == pytest.approx(row.union_simulated / 7.0)
        # A batch of 2 to 4 with 2 of 16 experts each.
        assert 2 < row.union_simulated < 8
        assert row.tpot_p50_simulated_ms == pytest.approx(3 + 0.5 * 4 + row.union_simulated, rel=0.2)


def test_a_policy_that_measured_nothing_is_named():
    nothing = {"tpot_ms": {"p50": None}, "ttft_ms": {"p50": None}, "union_mean": None}
    with pytest.raises(ResultError, match="jsq measured nothing"):
        compared(result(policies={"jsq": nothing}), counts(), ["code", "law"], [0])


def test_goals_are_ten_percent_of_time_and_five_of_experts():
    assert Row("jsq", 100, 109, 1.09, 40, 38.1, 38.1 / 40).within == (True, True)
    assert Row("jsq", 100, 89, 0.89, 40, 43, 43 / 40).within == (False, False)

"""The arithmetic of integration/bench/signature_quality.py."""

import numpy as np

from eldr.calibration.counts import Counts
from integration.bench.signature_quality import measured, step_union, union_change


def counts_of_two_domains() -> Counts:
    """Forty requests; each domain's steps pick from four experts of its own."""
    rng = np.random.default_rng(0)
    domains = ["even", "odd"] * 20
    ids = np.empty((40, 6, 2, 2), np.uint8)
    for request in range(40):
        own = 4 * (request % 2) + np.arange(4)
        ids[request] = [[rng.choice(own, 2, replace=False) for _ in range(2)] for _ in range(6)]
    counts = np.stack(
        [[np.bincount(ids[r, :, layer].ravel(), minlength=8) for layer in range(2)] for r in range(40)]
    )
    return Counts(
        ids=tuple(f"r{i}" for i in range(40)),
        fingerprint="m",
        top_k=2,
        moe_layers=(0, 1),
        prompt_len=np.full(40, 6),
        prefill_counts=counts,
        decode_counts=counts,
        domains=tuple(domains),
        decode_ids=ids,
        decode_len=np.full(40, 6),
    )


def test_the_union_of_a_step_is_counted_per_layer() -> None:
    ids = np.array([[[0, 1], [2, 3]], [[1, 2], [2, 3]]])
    assert step_union(ids) == (3 + 2) / 2


def test_same_domain_batches_of_disjoint_domains_touch_half_as_many_experts() -> None:
    change = union_change(counts_of_two_domains(), np.arange(40), 16, 0)
    assert change is not None
    assert -0.55 < change < -0.45


def test_every_figure_is_there_and_perfect_where_prefill_equals_decode() -> None:
    result = measured(counts_of_two_domains(), (), 0, 1_000)
    by_name = {row["transform"]: row for row in result["rho"]}
    assert by_name["count"]["rho"] > 0.999
    assert result["correlation"]["mean"] > 0.999
    assert set(result["union_change"]) == {"8", "16"}, "no domain fills a batch of 32"
    assert measured(counts_of_two_domains(), ("even",), 0, 1_000)["domains"] == ["even"]

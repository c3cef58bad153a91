from integration.bench.decision import measure, signatures, summary


def test_the_summary_is_in_microseconds():
    assert summary([1e-6, 2e-6, 3e-6]) == {"p50": 2.0, "p99": 3.0}


def test_every_stage_is_timed_for_every_decision():
    times = measure("union-cost", 2, 5, signatures(2))
    assert {stage: len(spent) for stage, spent in times.items()} == dict.fromkeys(times, 5)
    assert all(total >= select for total, select in zip(times["total"], times["select"], strict=True))

"""The JSON has the keys that others read, the table what people read, and a run passes only as a whole."""

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from eldr.demo.compare import OutputCheck, SignatureCheck
from eldr.demo.measure import PolicyFigures
from eldr.demo.outcome import Outcome
from eldr.demo.step_log import StepSample

FIGURES = PolicyFigures(200.0, 220.0, 230.0, 900.0, 44.0, 2.5, 100, 0)
BETTER = PolicyFigures(180.0, 200.0, 207.0, 800.0, 33.0, 2.0, 100, 0)
OUTCOME = Outcome(
    "0.32.0",
    {"round-robin": FIGURES, "union-cost": BETTER},
    OutputCheck(200, 1, ()),
    SignatureCheck(150, 0),
    0.98,
    steps={"jsq": (StepSample("d", 20, 15.0, 30.0, 100.0),)},
)


def test_the_json_has_exactly_the_agreed_keys():
    figures = {
        "tpot_ms": {"p50": 180.0, "p95": 200.0, "p99": 207.0},
        "ttft_ms": {"p50": 800.0},
        "union_mean": 33.0,
        "cpu_ms_per_token": 2.0,
        "requests": 100,
        "errors": 0,
    }
    written = OUTCOME.as_json()
    assert written["policies"]["union-cost"] == figures
    assert {key: value for key, value in written.items() if key != "policies"} == {
        "vllm_version": "0.32.0",
        "outputs_identical": True,
        "signatures_exact": True,
        "checked": {"outputs": 200, "signatures": 150},
        "workload": {
            "prefill": 1,
            "decode": 4,
            "requests": 234,
            "in_flight": 96,
            "output_tokens": 64,
            "prompt_tokens": 97,
        },
        "step_samples": {
            "jsq": [{"decoder": "d", "steps": 20, "batch": 15.0, "union": 30.0, "step_ms": 100.0}]
        },
    }


def test_what_was_not_measured_is_null_and_stays_valid_json():
    nothing = dataclasses.replace(FIGURES, tpot_p50_ms=math.nan, union_mean=math.nan)
    written = dataclasses.replace(OUTCOME, policies={"jsq": nothing}).as_json()
    assert json.loads(json.dumps(written, allow_nan=False))["policies"]["jsq"]["union_mean"] is None


def test_the_table_shows_figures_changes_and_verdicts():
    out = io.StringIO()
    Console(width=120, file=out).print(OUTCOME.as_table())
    shown = out.getvalue()
    for text in ("round-robin", "200.0", "-10.0%", "-25.0%", "yes (200 checked, 1 ties, 0 different)", "98%"):
        assert text in shown


@pytest.mark.parametrize(
    "change",
    [
        {"policies": {"jsq": dataclasses.replace(FIGURES, errors=1)}},
        {"outputs": OutputCheck(200, 0, ("r",))},
        {"outputs": OutputCheck(0, 0, ())},
        {"signatures": SignatureCheck(149, 1)},
        {"signatures": SignatureCheck(0, 0)},
    ],
)
def test_a_run_with_one_flaw_does_not_pass(change):
    assert OUTCOME.passed
    assert not dataclasses.replace(OUTCOME, **change).passed

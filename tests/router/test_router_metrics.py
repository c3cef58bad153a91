"""What the router exports is what it did, and all of it is in the catalogue and on the page."""

import ast
from pathlib import Path

import numpy as np
from router_rig import CoreRig

import eldr.router
from eldr.observability.series import exposition
from eldr.router.metrics import ROUTER, samples
from eldr.routing.state import DecoderTotals
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.scraped import Scraped, scraped

ROOT = Path(__file__).resolve().parents[2]


def read(rig: CoreRig) -> Scraped:
    return scraped(exposition(ROUTER, samples(rig.core)).decode())


def test_decisions_bookings_and_reports_are_those_of_the_run() -> None:
    rig = CoreRig(policy="jsq")
    rig.join("d1", "d2", "p1")
    totals = DecoderTotals(decode_steps=4, decode_tokens=10, union_tokens=70.0, step_time_s=0.5)
    rig.report("d1", running=3, waiting=1, union_last=7.5, totals=totals)
    rig.report("d2", running=0)
    rig.reserve("a")
    rig.reserve("b")
    rig.core.release(WorkerRole.DECODE, "a", Outcome.COMPLETED, 12)
    now = read(rig)
    assert now["eldr_decisions_total", (("policy", "jsq"),)] == 2
    assert now["eldr_decision_seconds_count", ()] == 2
    assert now["eldr_output_tokens_total", ()] == 12
    assert now["eldr_releases_total", (("outcome", "completed"), ("role", "decode"))] == 1
    booked = [value for (name, _), value in now.items() if name == "eldr_bookings"]
    assert sum(booked) == 1
    assert now["eldr_workers", (("health", "live"), ("role", "decode"))] == 2
    assert now["eldr_decoder_expert_union", (("worker_id", "d1"),)] == 7.5
    union, tokens = "eldr_decoder_union_tokens_total", "eldr_decoder_tokens_total"
    assert now[union, (("worker_id", "d1"),)] / now[tokens, (("worker_id", "d1"),)] == 7.0
    assert now["eldr_load_skew_ratio", ()] == 2.0


def test_an_empty_router_exports_without_an_error() -> None:
    assert ("eldr_decision_seconds_count", ()) in read(CoreRig())


def test_a_worker_that_leaves_takes_its_series_with_it() -> None:
    rig = CoreRig()
    rig.join("d1")
    assert ("eldr_decoder_running", (("worker_id", "d1"),)) in read(rig)
    rig.core.remove("d1")
    assert ("eldr_decoder_running", (("worker_id", "d1"),)) not in read(rig)


def test_a_group_of_decoders_has_its_learned_step_time() -> None:
    rig = CoreRig()
    rig.join("d1")
    for step in range(1, 5):
        totals = DecoderTotals(
            decode_steps=step, decode_tokens=8 * step, union_tokens=8.0 * step, step_time_s=0.02 * step
        )
        rig.report("d1", totals=totals, running=8)
    now = read(rig)
    groups = [labels for name, labels in now if name == "eldr_step_time_error_ratio"]
    assert len(groups) == 1
    assert np.isfinite(now["eldr_step_time_base_seconds", groups[0]])


def counted() -> dict[str, set[frozenset[str]]]:
    """Names that the router's code counts under, each with the labels it gives them."""
    found: dict[str, set[frozenset[str]]] = {}
    for path in Path(eldr.router.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in {"add", "set"} or not node.args:
                continue
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("eldr_"):
                labels = frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
                found.setdefault(name.value, set()).add(labels)
    return found


def test_all_that_the_router_counts_is_in_the_catalogue_with_its_labels() -> None:
    known = {series.name: frozenset(series.labels) for series in ROUTER.series}
    found = counted()
    assert len(found) > 15
    assert {name: labels for name, labels in found.items() if labels != {known.get(name)}} == {}


def test_the_page_lists_every_series_with_its_labels() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `eldr_")]
    listed = {row[1].strip().strip("`"): (row[2].strip(), row[3].strip(), row[4].strip()) for row in rows}
    wanted = {one.name: (one.kind.value, ", ".join(one.labels), one.help) for one in ROUTER.series}
    assert {name: listed.get(name) for name in wanted} == wanted

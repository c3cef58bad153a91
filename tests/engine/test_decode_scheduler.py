"""The decoder's state as its own scheduler advertises it. The vLLM scheduler is a stand-in here."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eldr.engine.scheduler import DecodeScheduler
from eldr.signature import ModelGeometry

GEOMETRY = ModelGeometry(moe_layers=(0, 1), experts=8, top_k=2, fingerprint="f")


@dataclass
class Report:
    """What eldr.engine.report.StepReport carries, without vLLM."""

    decode_tokens: int
    union: Any = None
    misses: int = 0


@dataclass
class Engine:
    """A scheduler with settable queues and a clock."""

    now: float = 100.0
    waiting: int = 0
    running: list[Any] = field(default_factory=list)
    kv_cache_manager: Any = field(default_factory=lambda: SimpleNamespace(usage=0.25))
    changes: int = 0

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), self.waiting


def touched(*experts: list[int]) -> Any:
    bits = np.zeros((2, 8), bool)
    for layer, ids in enumerate(experts):
        bits[layer, ids] = True
    return bits


def tap_of(engine: Engine, window: int = 4) -> DecodeScheduler:
    def changed() -> None:
        engine.changes += 1

    return DecodeScheduler(engine, GEOMETRY, window, changed, lambda: engine.now)


def step(engine: Engine, tap: DecodeScheduler, report: Report | None, seconds: float = 0.1) -> None:
    planned = SimpleNamespace(total_num_scheduled_tokens=1)
    tap.on_schedule(planned)
    engine.now += seconds
    if report is not None:
        tap.reported(report)  # type: ignore[arg-type]
    tap.on_update(planned)


def test_totals_weigh_the_union_by_batch() -> None:
    engine = Engine()
    tap = tap_of(engine)
    step(engine, tap, Report(2, touched([0, 1, 2], [0])), 0.1)
    step(engine, tap, Report(6, touched([0, 1, 2, 3], [4, 5])), 0.3)
    totals = tap.snapshot("d", "i", 1).totals
    assert (totals.decode_steps, totals.decode_tokens) == (2, 8)
    assert totals.union_tokens == pytest.approx(2 * 2.0 + 6 * 3.0)
    assert totals.step_time_s == pytest.approx(0.4)


def test_hit_frequencies_are_an_exponential_window_over_decode_steps() -> None:
    engine = Engine()
    tap = tap_of(engine, window=4)
    step(engine, tap, Report(1, touched([0], [1])))
    step(engine, tap, Report(1, touched([2], [1])))
    hit = tap.snapshot("d", "i", 1).hit_frequency
    assert hit is not None
    assert hit[0, [0, 2, 5]].tolist() == [0.75, 0.25, 0.0]
    assert hit[1, 1] == 1.0


def test_a_snapshot_does_not_change_with_later_steps() -> None:
    engine = Engine()
    tap = tap_of(engine)
    step(engine, tap, Report(1, touched([0], [1])))
    before = tap.snapshot("d", "i", 1)
    step(engine, tap, Report(1, touched([3], [3])))
    assert before.hit_frequency is not None
    assert before.hit_frequency[0, 0] == 1.0


def test_a_step_with_prefill_tokens_counts_for_no_decode_figure() -> None:
    engine = Engine()
    tap = tap_of(engine)
    step(engine, tap, Report(3, None))
    state = tap.snapshot("d", "i", 1)
    assert state.totals.decode_steps == 0
    assert state.hit_frequency is None
    assert state.step_time_last_s == 0.0


def test_overlapping_steps_are_timed_from_completion_to_completion() -> None:
    engine = Engine()
    tap = tap_of(engine)
    planned = SimpleNamespace(total_num_scheduled_tokens=1)
    tap.on_schedule(planned)
    engine.now += 0.05
    tap.on_schedule(planned)
    for expected in (0.25, 0.2):
        engine.now += 0.2
        tap.reported(Report(1, touched([0], [0])))  # type: ignore[arg-type]
        tap.on_update(planned)
        assert tap.snapshot("d", "i", 1).step_time_last_s == pytest.approx(expected)


def test_capture_misses_are_counted_and_make_no_union() -> None:
    engine = Engine()
    tap = tap_of(engine)
    step(engine, tap, Report(1, None, misses=2))
    assert tap.snapshot("d", "i", 1).totals.capture_misses == 2


def test_reservations_are_reported_while_their_requests_are_in_the_engine() -> None:
    engine = Engine()
    tap = tap_of(engine)
    tap.arrived("req-1", "res-1")
    tap.arrived("req-2", None)
    engine.waiting = 2
    step(engine, tap, None)
    assert tap.snapshot("d", "i", 1).reservation_ids == {"res-1"}
    assert engine.changes == 1
    tap.left("req-1")
    tap.left("req-2")
    engine.waiting = 0
    step(engine, tap, None)
    state = tap.snapshot("d", "i", 2)
    assert (state.reservation_ids, state.waiting) == (frozenset(), 0)
    assert engine.changes == 2


def test_a_request_is_known_by_the_routers_id_whatever_id_an_engine_gave_it() -> None:
    """Case 2.17: engines put random parts into their ids; what crosses workers is the router's own."""
    reported = []
    for engine_local in ("cmpl-x-0-1f2e", "cmpl-x-0-9b8a"):
        engine = Engine()
        tap = tap_of(engine)
        tap.arrived(engine_local, "res-1")
        step(engine, tap, None)
        reported.append(tap.snapshot("d", "i", 1).reservation_ids)
    assert reported == [{"res-1"}, {"res-1"}]


def test_an_unchanged_membership_wakes_nobody() -> None:
    engine = Engine()
    tap = tap_of(engine)
    for _ in range(5):
        step(engine, tap, Report(1, touched([0], [0])))
    assert engine.changes == 0


def test_a_report_says_its_own_age_and_queue() -> None:
    engine = Engine(
        running=[SimpleNamespace(num_computed_tokens=30), SimpleNamespace(num_computed_tokens=12)]
    )
    engine.num_late_kv_xfer_notices = 3  # type: ignore[attr-defined]
    tap = tap_of(engine)
    step(engine, tap, Report(2, touched([0], [0])))
    engine.now += 1.5
    state = tap.snapshot("d", "i", 7)
    assert state.age_s == pytest.approx(1.5)
    assert (state.running, state.kv_tokens, state.kv_usage, state.sequence) == (2, 42, 0.25, 7)
    assert state.totals.late_transfer_notices == 3


def test_steps_without_tokens_are_no_steps() -> None:
    engine = Engine()
    tap = tap_of(engine)
    empty = SimpleNamespace(total_num_scheduled_tokens=0)
    tap.on_schedule(empty)
    tap.on_update(empty)
    step(engine, tap, Report(1, touched([0], [0])), 0.2)
    assert tap.snapshot("d", "i", 1).step_time_last_s == pytest.approx(0.2)

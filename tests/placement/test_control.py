"""When a plan is sent, to whom, and what answers do."""

from dataclasses import replace

import numpy as np
import pytest

from eldr.placement.control import Controller, ControlSettings, DecoderPlacement, Verdict
from eldr.placement.demand import Demand
from eldr.placement.geometry import Geometry, PlacementError
from eldr.placement.plan import PlanSettings

GEOMETRY = Geometry(8, 2, 8)
LINEAR = np.tile(np.arange(8), (2, 1))
PLAN = PlanSettings(min_steps=64, expert_bytes=1000)
SETTINGS = ControlSettings(link_bytes_per_s=1e6, stall_s=0.0, plan=PLAN)


def steps(uneven: bool) -> np.ndarray:
    """Experts 0 to 3, all on rank 0 under `linear`, fire together; or all experts in turn."""
    made = np.zeros((64, 2, 8), dtype=bool)
    if uneven:
        made[:, :, :4] = True
    else:
        made[:, :, ::2] = True
    return made


def decoder(worker_id: str = "d1", uneven: bool = True, **changes) -> DecoderPlacement:
    demand = changes.pop("demand", None) or Demand.of_steps(steps(uneven))
    made = DecoderPlacement(worker_id, f"{worker_id}-1", GEOMETRY, LINEAR, 3, demand, 50.0, 1e-4)
    return replace(made, **changes)


def test_a_plan_that_pays_is_sent_with_what_it_saves_and_costs() -> None:
    move, verdicts = Controller(SETTINGS).consider([decoder()], 0.0)
    assert verdicts == {"d1": Verdict.MOVES}
    assert move is not None
    # Four experts on one rank become two on each, in both layers.
    assert move.saved_s == pytest.approx(2 * 1e-4 * 50.0 * 600.0)
    assert move.cost_s == pytest.approx(move.plan.moved_bytes / 1e6)
    assert (move.version, move.incarnation) == (3, "d1-1")


@pytest.mark.parametrize(
    ("changes", "settings", "verdict"),
    [
        ({"draining": True}, SETTINGS, Verdict.DRAINING),
        ({"uneven": False}, SETTINGS, Verdict.SMALL_GAIN),
        ({}, replace(SETTINGS, least_gain=0.6), Verdict.SMALL_GAIN),
        ({}, replace(SETTINGS, stall_s=10.0), Verdict.DOES_NOT_PAY),
        ({}, replace(SETTINGS, link_bytes_per_s=100.0), Verdict.DOES_NOT_PAY),
        ({"steps_per_s": 0.0}, SETTINGS, Verdict.DOES_NOT_PAY),
        ({"demand": Demand.of_steps(steps(True)[:32])}, SETTINGS, Verdict.FEW_STEPS),
    ],
)
def test_what_does_not_move_has_a_verdict(changes: dict, settings: ControlSettings, verdict: Verdict) -> None:
    move, verdicts = Controller(settings).consider([decoder(**changes)], 0.0)
    assert move is None
    assert verdicts == {"d1": verdict}


def test_one_decoder_at_a_time_and_the_largest_saving_first() -> None:
    controller = Controller(SETTINGS)
    busy, idle = decoder("d1", steps_per_s=80.0), decoder("d2", steps_per_s=20.0)
    move, verdicts = controller.consider([idle, busy], 0.0)
    assert move is not None
    assert (move.worker_id, verdicts["d2"]) == ("d1", Verdict.OTHER_IN_FLIGHT)
    assert controller.consider([idle, busy], 1.0)[0] is None
    assert controller.answered("d1", "d1-1", 4, accepted=True, now_s=2.0)
    following, verdicts = controller.consider([idle, busy], 3.0)
    assert following is not None
    assert (following.worker_id, verdicts["d1"]) == ("d2", Verdict.TOO_SOON)


def test_refusals_wait_longer_each_time_and_an_accepted_plan_ends_that() -> None:
    controller, now_s, pauses = Controller(SETTINGS), 0.0, []
    assert controller.consider([decoder()], now_s)[0] is not None
    for accepted in (False, False, True, False):
        controller.answered("d1", "d1-1", 4, accepted, now_s)
        answered_s = now_s
        while controller.consider([decoder()], now_s)[0] is None:
            now_s += 60.0
        pauses.append(now_s - answered_s)
    assert pauses == [120.0, 240.0, 60.0, 120.0]


def test_a_late_answer_or_one_of_another_process_has_no_effect() -> None:
    controller = Controller(SETTINGS)
    controller.consider([decoder()], 0.0)
    assert not controller.answered("d1", "d1-0", 4, accepted=True, now_s=1.0)
    assert not controller.answered("d1", "d1-1", 3, accepted=True, now_s=1.0)
    assert controller.consider([decoder()], 121.0)[1] == {"d1": Verdict.TOO_SOON}
    assert not controller.answered("d1", "d1-1", 4, accepted=True, now_s=122.0)


def test_a_restart_in_the_middle_ends_the_wait_and_inherits_no_pause() -> None:
    controller = Controller(SETTINGS)
    controller.consider([decoder()], 0.0)
    restarted = decoder(incarnation="d1-2", version=0)
    move, _ = controller.consider([restarted], 1.0)
    assert move is not None
    assert (move.incarnation, move.version) == ("d1-2", 0)


def test_a_decoder_that_drains_with_a_move_in_flight_blocks_others_until_it_is_gone() -> None:
    controller = Controller(SETTINGS)
    controller.consider([decoder()], 0.0)
    both = [decoder(draining=True), decoder("d2")]
    assert controller.consider(both, 1.0)[1] == {"d1": Verdict.DRAINING, "d2": Verdict.OTHER_IN_FLIGHT}
    assert controller.consider(both[1:], 2.0)[1] == {"d2": Verdict.MOVES}


@pytest.mark.parametrize("field", ["link_bytes_per_s", "pays", "least_gain", "interval_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_setting_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(PlacementError, match=field):
        ControlSettings(**{field: value})


def test_a_figure_that_is_not_finite_is_named_with_its_decoder() -> None:
    with pytest.raises(PlacementError, match="d1: steps_per_s"):
        decoder(steps_per_s=float("inf"))

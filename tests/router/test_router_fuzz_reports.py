"""A decoder that lies: whatever its reports hold, the next decision is made."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_rig import CoreRig, fake_profile

from eldr.router.core import RouterCore
from eldr.router.settings import RouterSettings
from eldr.routing.state import DecoderTotals
from eldr.rpc.codec import CodecError, decode_state
from eldr.testing.signatures import FAKE_GEOMETRY
from eldr.v1 import decode_pb2

COUNT = st.integers(0, 5) | st.integers(0, 2**32 - 1)
LARGE = st.integers(0, 5) | st.integers(0, 2**64 - 1)
# Most pass the codec, so that whole reports do.
NUMBER = st.integers(0, 19).flatmap(
    lambda turn: (
        st.sampled_from([-1.0, math.nan, math.inf, -math.inf])
        if turn == 19
        else st.sampled_from([0.0, 1e-300, 0.01, 0.5, 1.0, 1e6, 1e300])
    )
)
SHAPES = st.sampled_from([FAKE_GEOMETRY.shape, FAKE_GEOMETRY.shape[::-1], (1, 1), (2, 7), (0, 0), (1, 0)])
POLICIES = ["union-cost", "jsq", "p2c", "locality-band", "locality-band-online"]


@st.composite
def reports(draw: st.DrawFn) -> decode_pb2.DecoderState:
    layers, experts = draw(SHAPES)
    # Sometimes the bytes are not of the shape that is named beside them.
    cells = draw(st.sampled_from([layers * experts, layers * experts, 3]))
    return decode_pb2.DecoderState(
        worker_id="d0",
        incarnation="d0-1",
        sequence=draw(LARGE),
        age_s=draw(NUMBER),
        running=draw(COUNT),
        waiting=draw(COUNT),
        kv_usage=draw(NUMBER),
        kv_tokens=draw(LARGE),
        step_time_ewma_s=draw(NUMBER),
        step_time_last_s=draw(NUMBER),
        batch_last=draw(COUNT),
        union_last=draw(NUMBER),
        hit_frequency=draw(st.sampled_from([b"\x00", b"\x80", b"\xff"])) * cells,
        layers=layers,
        experts=experts,
        reservation_ids=draw(st.lists(st.sampled_from(["r1", "r2", "", "x" * 300]), max_size=3)),
        draining=False,
        placement_version=draw(LARGE),
        totals=decode_pb2.DecoderTotals(
            decode_steps=draw(LARGE),
            decode_tokens=draw(LARGE),
            union_tokens=draw(NUMBER),
            step_time_s=draw(NUMBER),
            late_transfer_notices=draw(LARGE),
            capture_misses=draw(LARGE),
        ),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_is_made_whatever_a_decoder_reports(policy: str) -> None:
    @settings(max_examples=40)
    @given(st.lists(reports(), min_size=1, max_size=4))
    def decides(messages: list[decode_pb2.DecoderState]) -> None:
        rig = CoreRig()
        rig.core = RouterCore(RouterSettings(policy=policy), fake_profile(), rig.clock)
        rig.join("d0", "d1")
        for message in messages:
            rig.clock.advance(0.1)
            try:
                state = decode_state(message)
            except CodecError:
                continue
            rig.core.report(state)
        rig.core.prepare()
        assert rig.reserve("r9") in ("d0", "d1")
        rig.core.tick()
        assert len(rig.core.workers()) == 2

    decides()


def test_a_decoder_that_claims_more_requests_than_it_could_have_is_refused() -> None:
    """Tables over batch sizes grow with the largest one: 2^32 requests would take 64 GiB of the router."""
    for field in ("running", "waiting", "batch_last", "kv_tokens"):
        message = decode_pb2.DecoderState(worker_id="d0", incarnation="d0-1", **{field: 2**32 - 1})
        if field == "kv_tokens":
            message.kv_tokens = 2**60
        with pytest.raises(CodecError, match=f"{field} must be at most"):
            decode_state(message)


def test_step_times_that_no_decoder_has_teach_nothing() -> None:
    """Their squares would leave the range of numbers, and the next solution would fail."""
    rig = CoreRig()
    rig.join("d0", "d1")
    for step_time_s in (5e-324, 1e-300, 1e300):
        rig.report("d0", batch_last=4, union_last=2.0, step_time_last_s=step_time_s)
        totals = DecoderTotals(1, 1, 1.0, step_time_s)
        rig.report("d0", totals=totals)
    assert rig.reserve("r1") in ("d0", "d1")

"""Geometry, workers, states and decisions survive the wire; what makes no sense is refused by field."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eldr.routing.contract import Candidate, Decision
from eldr.routing.state import MAX_REQUESTS, DecoderState, DecoderTotals
from eldr.rpc import codec
from eldr.rpc.codec import CodecError
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.geometry import ModelGeometry
from eldr.v1 import decode_pb2, routing_pb2, signature_pb2, worker_pb2

GEOMETRY = ModelGeometry((1, 3), experts=4, top_k=2, fingerprint="sha256:ab")
INFO = WorkerInfo(
    worker_id="decode-0",
    incarnation="i1",
    role=WorkerRole.DECODE,
    http_url="http://127.0.0.1:8101",
    grpc_address="127.0.0.1:8201",
    geometry=GEOMETRY,
    served_model="m",
    block_size=32,
    engine_version="0.32.0",
    max_model_len=2048,
    max_num_seqs=16,
    kv_layout="float32",
    hit_window_steps=16,
)

counters = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1e6)


@st.composite
def states(draw: st.DrawFn) -> DecoderState:
    shape = draw(st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 9))))
    hit = None
    if shape is not None:
        # Multiples of 1/255 are what the wire can say.
        hit = draw(hnp.arrays(np.uint8, shape)).astype(np.float32) / np.float32(255.0)
    return DecoderState(
        worker_id=draw(st.text(max_size=9)),
        incarnation=draw(st.text(max_size=9)),
        sequence=draw(st.integers(0, 2**64 - 1)),
        age_s=draw(seconds),
        running=draw(st.integers(0, MAX_REQUESTS)),
        waiting=draw(st.integers(0, MAX_REQUESTS)),
        kv_usage=draw(st.floats(0, 1)),
        kv_tokens=draw(counters),
        step_time_ewma_s=draw(seconds),
        step_time_last_s=draw(seconds),
        batch_last=draw(st.integers(0, MAX_REQUESTS)),
        union_last=draw(st.floats(0, 512)),
        hit_frequency=hit,
        reservation_ids=draw(st.frozensets(st.text(min_size=1, max_size=6), max_size=5)),
        draining=draw(st.booleans()),
        placement_version=draw(st.integers(0, 2**64 - 1)),
        totals=DecoderTotals(
            draw(counters),
            draw(counters),
            draw(seconds),
            draw(seconds),
            *(draw(counters) for _ in range(4)),
        ),
    )


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9, unique=True).map(sorted),
    st.integers(1, 512),
    st.text(min_size=1, max_size=70),
    st.data(),
)
def test_a_geometry_survives_the_wire(
    layers: list[int], experts: int, fingerprint: str, data: st.DataObject
) -> None:
    geometry = ModelGeometry(tuple(layers), experts, data.draw(st.integers(1, experts)), fingerprint)
    raw = codec.encode_geometry(geometry).SerializeToString()
    assert codec.decode_geometry(signature_pb2.ModelGeometry.FromString(raw)) == geometry


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"moe_layers": []}, "moe_layers must be ascending and not empty"),
        ({"moe_layers": [3, 1]}, "moe_layers must be ascending"),
        ({"moe_layers": [1, 1]}, "moe_layers must be ascending"),
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be 1 to 4, got 0"),
        ({"top_k": 5}, "top_k must be 1 to 4, got 5"),
        ({"fingerprint": ""}, "fingerprint must not be empty"),
    ],
)
def test_a_geometry_out_of_range_is_refused_by_field(fields: dict[str, object], error: str) -> None:
    right: dict[str, object] = {"moe_layers": [1, 3], "experts": 4, "top_k": 2, "fingerprint": "f"}
    message = signature_pb2.ModelGeometry(**{**right, **fields})  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=f"geometry: {error}"):
        codec.decode_geometry(message)


@pytest.mark.parametrize("role", list(WorkerRole))
def test_a_worker_survives_the_wire(role: WorkerRole) -> None:
    info = WorkerInfo(**{**{name: getattr(INFO, name) for name in INFO.__slots__}, "role": role})
    raw = codec.encode_worker_info(info).SerializeToString()
    assert codec.decode_worker_info(worker_pb2.WorkerInfo.FromString(raw)) == info


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("role", worker_pb2.WORKER_ROLE_UNSPECIFIED, "role must be prefill or decode, got 0"),
        ("role", 9, "role must be prefill or decode, got 9"),
        ("worker_id", "", "worker_id must not be empty"),
        ("incarnation", "", "incarnation must not be empty"),
        ("grpc_address", "", "grpc_address must not be empty"),
        ("served_model", "", "served_model must not be empty"),
        ("http_url", "127.0.0.1:8101", "http_url must start with http:// or https://, got '127.0.0.1:8101'"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
    ],
)
def test_a_worker_out_of_range_is_refused_by_field(field: str, value: object, error: str) -> None:
    message = codec.encode_worker_info(INFO)
    setattr(message, field, value)
    with pytest.raises(CodecError, match=f"^worker: {error}"):
        codec.decode_worker_info(message)


def test_a_worker_without_geometry_is_refused() -> None:
    message = codec.encode_worker_info(INFO)
    message.ClearField("geometry")
    with pytest.raises(CodecError, match="geometry: moe_layers must be"):
        codec.decode_worker_info(message)


@given(states())
def test_a_state_survives_the_wire(state: DecoderState) -> None:
    raw = codec.encode_state(state).SerializeToString()
    back = codec.decode_state(decode_pb2.DecoderState.FromString(raw))
    for name in DecoderState.__slots__:
        if name != "hit_frequency":
            assert getattr(back, name) == getattr(state, name), name
    if state.hit_frequency is None:
        assert back.hit_frequency is None
    else:
        assert back.hit_frequency is not None
        np.testing.assert_array_equal(back.hit_frequency, state.hit_frequency)


@given(hnp.arrays(np.float32, (3, 5), elements=st.floats(-1, 2, width=32)))
def test_frequencies_lose_at_most_half_a_step_and_are_clipped_to_probabilities(
    hit: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> None:
    raw = np.frombuffer(codec.quantise_frequency(hit), np.uint8).reshape(3, 5) / 255.0
    assert np.abs(raw - np.clip(hit, 0, 1)).max() <= 0.5 / 255 + 1e-6


def test_extreme_frequencies_are_exact() -> None:
    """0 and 1 must come back as such: 1 - h decides whether an expert is free."""
    assert codec.quantise_frequency(np.array([[0.0, 1.0]], np.float32)) == b"\x00\xff"


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("age_s", math.nan, "age_s must be finite and not negative, got nan"),
        ("age_s", -1.0, "age_s must be finite and not negative, got -1.0"),
        ("kv_usage", math.inf, "kv_usage must be finite"),
        ("step_time_ewma_s", math.nan, "step_time_ewma_s must be finite"),
        ("step_time_last_s", -0.1, "step_time_last_s must be finite and not negative"),
        ("union_last", math.nan, "union_last must be finite"),
        ("layers", 2, "hit_frequency holds 8 bytes, expected layers \\* experts = 2 \\* 8"),
        ("experts", 0, "hit_frequency holds 8 bytes, expected layers \\* experts = 1 \\* 0"),
        ("hit_frequency", b"abc", "hit_frequency holds 3 bytes"),
    ],
)
def test_a_state_out_of_range_is_refused_by_worker_and_field(field: str, value: object, error: str) -> None:
    hit = np.zeros((1, 8), np.float32)
    message = codec.encode_state(DecoderState("decode-0", "i1", 1, hit_frequency=hit))
    setattr(message, field, value)
    with pytest.raises(CodecError, match=f"decode-0: {error}"):
        codec.decode_state(message)


@pytest.mark.parametrize("field", ["union_tokens", "step_time_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_totals_that_are_no_totals_are_refused(field: str, value: float) -> None:
    """One such report would poison every mean over the time it is part of."""
    message = codec.encode_state(DecoderState("decode-0", "i1", 1))
    setattr(message.totals, field, value)
    with pytest.raises(CodecError, match=f"{field} must be finite and not negative"):
        codec.decode_state(message)


def test_a_decision_survives_the_wire_with_its_unscored_candidates() -> None:
    decision = Decision(
        worker_id="decode-1",
        policy="union-cost",
        reason="lowest cost",
        candidates=(
            Candidate("decode-0", False, math.nan, "draining", 3),
            Candidate("decode-1", True, 0.25, "dU 1.5", 4),
        ),
        fallback="no_signature",
    )
    worker = routing_pb2.WorkerRef(worker_id="decode-1", http_url="http://h:1")
    raw = codec.encode_decision(decision, worker).SerializeToString()
    message = routing_pb2.Decision.FromString(raw)
    back = codec.decode_decision(message)
    assert message.worker.http_url == "http://h:1"
    assert math.isnan(back.candidates[0].score)
    assert (back.worker_id, back.policy, back.reason, back.fallback) == (
        *("decode-1", "union-cost", "lowest cost", "no_signature"),
    )
    assert back.candidates[1] == decision.candidates[1]


def test_a_query_becomes_a_request_under_the_reservation_id() -> None:
    query = routing_pb2.DecodeQuery(
        prompt_tokens=7, max_tokens=9, domain="law", exclude_worker_ids=["decode-2", "decode-2"]
    )
    request = codec.decode_query("r1", query, None)
    assert request.request_id == "r1"
    assert request.signature is None
    assert (request.prompt_tokens, request.max_tokens, request.domain) == (7, 9, "law")
    assert request.exclude == frozenset({"decode-2"})

"""Samples of live traffic become counts files: bounded, whole, off the request path."""

import asyncio
from dataclasses import replace

import grpc
import numpy as np
import pytest
from fake_two_leg_worker import EXPERTS, LAYERS, TOP_K, signature

from eldr.calibration.counts_file import load_counts, load_merged
from eldr.client import RouterUnreachableError, WorkerError, WorkerHealth, WorkerRole, WorkerStatus
from eldr.engine import decode_counts
from eldr.gateway import sampling
from eldr.gateway.counters import Counts, Event
from eldr.gateway.sampling import FinishedRequest
from eldr.recording.live import LiveRecorder, LiveSettings, remove_oldest
from eldr.rpc.codec import signature_to_text
from eldr.rpc.worker_info import WorkerInfo
from eldr.signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry

MOE_LAYERS = tuple(range(1, LAYERS + 1))


def test_gateway_and_decoder_agree_on_what_keeps_counts():
    assert {decode_counts.WANTED_KEY: decode_counts.KEPT} == sampling.KEEP_COUNTS


class Decoders:
    """What decoders have kept, by reservation. `gate` holds every read up."""

    def __init__(self):
        self.kept = {}
        self.reads = []
        self.gate = None
        self.asked = asyncio.Event()

    async def read(self, grpc_address, reservation_id):
        self.reads.append((grpc_address, reservation_id))
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if reservation_id not in self.kept:
            raise WorkerError(grpc.StatusCode.NOT_FOUND, "no decode counts")
        return self.kept[reservation_id]


class Rig:
    """A started recorder and what it talks to."""

    def __init__(self, folder, **settings):
        self.folder = folder / "live"
        self.counts = Counts()
        self.decoders = Decoders()
        self.router_error = None
        self.fleet_calls = 0
        self.fingerprints = ["f"]
        self.recorder = LiveRecorder(
            LiveSettings(self.folder, **{"share": 1.0, "settle_s": 0.0} | settings),
            self.counts,
            self.decoders.read,
            self.workers,
        )
        self.recorder.start()

    async def workers(self):
        self.fleet_calls += 1
        if self.router_error:
            raise self.router_error
        return [
            WorkerStatus(
                WorkerInfo(
                    f"d{fingerprint}",
                    "i",
                    WorkerRole.DECODE,
                    "http://d",
                    "d:1",
                    ModelGeometry(MOE_LAYERS, EXPERTS, TOP_K, fingerprint),
                    "m",
                    16,
                ),
                WorkerHealth.LIVE,
                0,
                0.1,
                None,
                "",
            )
            for fingerprint in self.fingerprints
        ]

    def finish(self, name, prompt=7, generated=5, fingerprint="f", decode_grpc="d:1", domain=""):
        """A request ends well; its decoder has kept its counts."""
        if generated is not None:
            self.decoders.kept[name] = signature(prompt, generated, fingerprint)
        text = signature_to_text(signature(prompt, prompt, fingerprint))
        self.recorder.offer(FinishedRequest(name, text, decode_grpc, domain))

    @property
    def files(self):
        return sorted(self.folder.glob("*.npz"))


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(**settings):
        made.append(Rig(tmp_path, **settings))
        return made[-1]

    return make


async def test_both_legs_of_sampled_requests_are_joined_in_one_file(rig):
    live = rig()
    live.finish("a", 7, 5, domain="law")
    live.finish("b", 9, 3)
    await live.recorder.stop()
    counts = load_counts(live.files[0])
    assert len(live.files) == 1
    assert (counts.ids, counts.domains) == (("a", "b"), ("law", ""))
    assert (counts.fingerprint, counts.moe_layers, counts.top_k) == ("f", MOE_LAYERS, TOP_K)
    assert counts.prompt_len.tolist() == [7, 9]
    assert counts.decode_tokens.tolist() == [5, 3]
    np.testing.assert_array_equal(counts.prefill_counts[1], signature(9, 9).counts)
    np.testing.assert_array_equal(counts.decode_counts[0], signature(7, 5).counts)
    assert live.decoders.reads == [("d:1", "a"), ("d:1", "b")]
    assert live.counts == {Event.COUNTS_RECORDED: 2}
    assert live.fleet_calls == 1, "layer indices are asked once"


async def test_files_are_written_when_full_and_merge_for_a_fit(rig):
    live = rig(file_requests=2)
    for name in "abcde":
        live.finish(name)
    await live.recorder.stop()
    assert [load_counts(path).requests for path in live.files] == [2, 2, 1]
    assert load_merged(live.files).ids == tuple("abcde")


async def test_a_file_is_written_after_a_while_though_it_is_not_full(rig):
    live = rig(flush_s=0.02)
    live.finish("a")
    async with asyncio.timeout(20):
        while not live.files:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.005)
    await live.recorder.stop()
    assert load_counts(live.files[0]).ids == ("a",)
    assert len(live.files) == 1


async def test_a_full_queue_drops_and_counts_and_never_waits(rig):
    live = rig(queue=2)
    live.decoders.gate = asyncio.Event()
    live.finish("a")
    await live.decoders.asked.wait()
    for name in "bcde":
        live.finish(name)
    assert live.counts[Event.COUNTS_DROPPED] == 2
    live.decoders.gate.set()
    await live.recorder.stop()
    assert load_counts(live.files[0]).ids == ("a", "b", "c")


async def test_a_stop_does_not_wait_for_a_decoder_that_never_answers(rig, monkeypatch):
    monkeypatch.setattr("eldr.recording.live.STOP_S", 0.05)
    live = rig()
    live.finish("a")
    await live.recorder._queue.join()
    live.decoders.gate = asyncio.Event()
    live.finish("b")
    live.finish("c")
    await live.recorder.stop()
    assert load_counts(live.files[0]).ids == ("a",)
    assert live.counts[Event.COUNTS_DROPPED] == 2


async def test_a_request_whose_decoder_kept_nothing_is_left_out_and_counted(rig):
    live = rig()
    live.finish("a", generated=None)
    live.finish("b")
    await live.recorder.stop()
    assert load_counts(live.files[0]).ids == ("b",)
    assert live.counts == {Event.COUNTS_MISSING: 1, Event.COUNTS_RECORDED: 1}


async def test_a_decoder_is_not_asked_before_it_can_have_heard_of_a_stop_string(rig):
    live = rig(settle_s=0.05)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    live.finish("a")
    live.finish("b")
    await live.decoders.asked.wait()
    assert loop.time() - begin >= 0.05
    await live.recorder.stop()
    assert load_counts(live.files[0]).ids == ("a", "b")


@pytest.mark.parametrize("decode_grpc", ["", "d:1"])
async def test_a_request_of_one_token_keeps_its_prompt_counts(rig, decode_grpc):
    """Case 1.14: without a decode leg, or with one that generated the one token and ran none."""
    live = rig()
    live.decoders.kept["a"] = ExpertSignature("f", TOP_K, 0, 0, np.zeros((LAYERS, EXPERTS), np.uint32))
    live.finish("a", 7, None, decode_grpc=decode_grpc)
    await live.recorder.stop()
    counts = load_counts(live.files[0])
    np.testing.assert_array_equal(counts.prefill_counts[0], signature(7, 7).counts)
    assert counts.decode_tokens.tolist() == [0]


async def test_a_prompt_that_is_not_wholly_covered_is_left_out_and_counted(rig):
    """Case 1.16: no row is guessed for KV that came from elsewhere."""
    live = rig()
    whole = signature(4, 4)
    partial = ExpertSignature("f", TOP_K, 6, 4, whole.counts)
    live.decoders.kept["a"] = signature(4, 5)
    live.recorder.offer(FinishedRequest("a", signature_to_text(partial), "d:1", ""))
    await live.recorder.stop()
    assert live.files == []
    assert live.counts == {Event.COUNTS_PARTIAL: 1}


async def test_what_is_no_signature_or_of_two_models_is_refused_and_counted(rig):
    live = rig()
    live.recorder.offer(FinishedRequest("a", "!", "", ""))
    live.finish("b")
    live.decoders.kept["b"] = signature(7, 5, "other")
    await live.recorder.stop()
    assert live.files == []
    assert live.counts == {Event.COUNTS_REFUSED: 2}


async def test_a_change_of_model_begins_a_new_file(rig):
    live = rig()
    live.fingerprints = ["f", "g"]
    live.finish("a")
    live.finish("b", fingerprint="g")
    await live.recorder.stop()
    assert [load_counts(path).fingerprint for path in live.files] == ["f", "g"]


async def test_without_the_fleets_layers_nothing_is_guessed(rig):
    live = rig()
    live.router_error = RouterUnreachableError(grpc.StatusCode.UNAVAILABLE, "gone")
    live.finish("a")
    await live.recorder._queue.join()
    live.router_error = None
    live.finish("b", fingerprint="unknown")
    live.finish("c")
    await live.recorder.stop()
    assert load_counts(live.files[0]).ids == ("c",)
    assert live.counts == {Event.COUNTS_UNPLACED: 2, Event.COUNTS_RECORDED: 1}


async def test_a_disk_that_takes_nothing_is_counted_and_recording_goes_on(rig):
    live = rig(file_requests=1)
    live.folder.rmdir()
    live.finish("a")
    await live.recorder._queue.join()
    live.folder.mkdir()
    live.finish("b")
    await live.recorder.stop()
    assert load_counts(live.files[0]).ids == ("b",)
    assert live.counts[Event.COUNTS_UNWRITTEN] == 1


async def test_the_oldest_files_go_where_the_bound_is_passed_and_others_stay(rig):
    live = rig(file_requests=1, max_bytes=1)
    (live.folder / "mine.npz").write_bytes(b"x" * 100)
    for name in "abc":
        live.finish(name)
    await live.recorder.stop()
    assert (live.folder / "mine.npz").exists()
    (last,) = live.folder.glob("live-*.npz")
    assert load_counts(last).ids == ("c",)


async def test_a_file_that_cannot_be_removed_is_counted_and_recording_goes_on(rig, monkeypatch):
    def denied(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr("eldr.recording.live.remove_oldest", denied)
    live = rig(file_requests=1)
    live.finish("a")
    live.finish("b")
    await live.recorder.stop()
    assert [load_counts(path).ids for path in live.files] == [("a",), ("b",)]
    assert live.counts == {Event.COUNTS_RECORDED: 2, Event.COUNTS_UNREMOVED: 2}


def test_files_within_the_bound_stay(tmp_path):
    for number in range(4):
        (tmp_path / f"live-{number}.npz").write_bytes(b"x" * 10)
    assert remove_oldest(tmp_path, 25) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live-2.npz", "live-3.npz"]


async def test_the_share_is_drawn_for_each_request(rig):
    draws = iter([0.0, 0.24, 0.25, 0.9])
    live = rig()
    recorder = LiveRecorder(
        replace(live.recorder._settings, share=0.25),
        Counts(),
        live.decoders.read,
        live.workers,
        lambda: next(draws),
    )
    assert [recorder.wanted() for _ in range(4)] == [True, True, False, False]
    await live.recorder.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share", 0.0),
        ("share", 1.1),
        ("file_requests", 0),
        ("max_bytes", 0),
        ("queue", 0),
        ("flush_s", 0.0),
        ("settle_s", -1.0),
    ],
)
def test_a_live_setting_out_of_range_is_refused_by_name(tmp_path, field, value):
    with pytest.raises(ValueError, match=field):
        LiveSettings(tmp_path, **{field: value})

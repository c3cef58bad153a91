"""Time of one decision, from the bytes of a signature to the pick, `union-cost` against the published band rule.

    OPENBLAS_NUM_THREADS=1 python -m integration.bench decision [--quick] [--json FILE]

48 layers x 128 experts, top-8, prompts of 200 tokens, 40 requests in flight a decoder. After each decision it is
booked and `prepare` is called, as the router does once it has answered; the time of that is a stage of its own.
Microseconds, median and 99th percentile.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from eldr.routing.contract import Booking, DecodeRequest, DecoderView
from eldr.routing.registry import Sources, make_policy
from eldr.routing.state import DecoderState
from eldr.rpc.codec import decode_signature, encode_signature
from eldr.signature.expert_signature import ExpertSignature
from eldr.v1 import signature_pb2

LAYERS, EXPERTS, TOP_K, TOKENS, IN_FLIGHT = 48, 128, 8, 200, 40


class Centroids:
    """One centroid a decoder, for the band."""

    def __init__(self, clusters: int) -> None:
        rows = np.random.default_rng(1).random((clusters, LAYERS * EXPERTS)).astype(np.float32)
        self.clusters = clusters
        self._rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def similarities(self, signature: ExpertSignature) -> "np.typing.NDArray[np.float32] | None":
        vector = signature.counts.reshape(-1).astype(np.float32)
        return self._rows @ (vector / np.linalg.norm(vector))


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99])
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}


def signatures(count: int) -> list[ExpertSignature]:
    """Prompts whose tokens select `TOP_K` different experts each."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        taste = rng.normal(0, 1.5, (LAYERS, 1, EXPERTS)) + rng.gumbel(size=(LAYERS, TOKENS, EXPERTS))
        picks = np.argpartition(-taste, TOP_K, axis=2)[:, :, :TOP_K].reshape(LAYERS, -1)
        counts = np.stack([np.bincount(row, minlength=EXPERTS) for row in picks])
        made.append(ExpertSignature("bench", TOP_K, TOKENS, TOKENS, counts.astype(np.uint32)))
    return made


def measure(
    name: str, decoders: int, decisions: int, prompts: list[ExpertSignature]
) -> dict[str, list[float]]:
    """Seconds per stage: unpack, select, prepare, and total = unpack + select."""
    rng = np.random.default_rng(0)
    views = []
    for i in range(decoders):
        hit = rng.random((LAYERS, EXPERTS)).astype(np.float32)
        ids = [f"{i}-{j}" for j in range(IN_FLIGHT)]
        state = DecoderState(
            f"d{i:03}", "i", 1, running=IN_FLIGHT, hit_frequency=hit, reservation_ids=frozenset(ids)
        )
        bookings = {rid: Booking(rid, prompts[j % len(prompts)]) for j, rid in enumerate(ids)}
        views.append(DecoderView(state.worker_id, state, bookings))
    policy = make_policy(name, {}, Sources(locality=Centroids(decoders)))
    prepare: Callable[..., None] = getattr(policy, "prepare", lambda fleet, shape: None)
    messages = [encode_signature(prompt).SerializeToString() for prompt in prompts]
    times: dict[str, list[float]] = {"unpack": [], "select": [], "prepare": [], "total": []}
    for k in range(decisions + 20):
        fleet = tuple(views)
        t0 = time.perf_counter()
        signature = decode_signature(signature_pb2.ExpertSignature.FromString(messages[k % len(messages)]))
        t1 = time.perf_counter()
        picked = policy.select(DecodeRequest(f"r{k}", signature), fleet).worker_id
        t2 = time.perf_counter()
        view = views[int(picked[1:])]
        bookings = dict(view.bookings)
        bookings[f"r{k}"] = Booking(f"r{k}", signature)
        if len(view.unreported) > 8:
            bookings = dict(list(bookings.items())[:IN_FLIGHT])
        views[int(picked[1:])] = DecoderView(picked, view.state, bookings)
        t3 = time.perf_counter()
        prepare(tuple(views), (LAYERS, EXPERTS))
        t4 = time.perf_counter()
        if k >= 20:
            for stage, spent in zip(times, (t1 - t0, t2 - t1, t4 - t3, t2 - t0), strict=True):
                times[stage].append(spent)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="200 decisions instead of 3,000")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    decisions = 200 if arguments.quick else 3000
    prompts = signatures(40)
    cases = {
        "decision_us": ("union-cost", 16),
        "band_us": ("locality-band", 16),
        "decision_512_us": ("union-cost", 512),
    }
    results: dict[str, dict[str, float]] = {}
    stages: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'case':18} {'stage':8} {'p50':>8} {'p99':>8}   microseconds")
    for key, (name, decoders) in cases.items():
        times = measure(name, decoders, decisions, prompts)
        stages[key] = {stage: summary(spent) for stage, spent in times.items()}
        results[key] = stages[key]["total"]
        for stage, row in stages[key].items():
            print(f"{key:18} {stage:8} {row['p50']:8.1f} {row['p99']:8.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({**results, "stages": stages}, indent=1) + "\n")


if __name__ == "__main__":
    main()

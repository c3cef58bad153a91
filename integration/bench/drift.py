"""When a refit pays: the band's union gain that old centroids lose, against the drift measures.

    python -m integration.bench drift COUNTS [--decoders 8] [--seeds 6] [--quick] [--json FILE]

COUNTS is a counts file with domains and single decode steps. In each seed a profile is fitted on half of the domains;
the live traffic then takes a growing share from the other half, or a more and more skewed mix of the known ones. The
fleet is a closed system: every decoder steps its requests, one ends, the next is placed by JSQ, by the band on the
old centroids, and by the band on centroids refitted to that traffic (frozen weights, other requests than those
placed). The gain is what the distinct experts per layer, as the mean request meets them, fall below JSQ's.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.calibration.counts import Counts
from eldr.calibration.counts_file import load_counts
from eldr.calibration.drift import OCCUPANCY_LIMIT, OUTSIDE_LIMIT, baseline, drift
from eldr.calibration.fit_record import ClusterRecord
from eldr.calibration.kmeans import spherical_kmeans
from eldr.calibration.refit import Centroids, Refitter, owned_rows
from eldr.routing.contract import DecodeRequest, DecoderView, Policy
from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.locality_band import LocalityBand
from eldr.routing.state import DecoderState
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.transform import transform_named, unit_rows

Rows = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

TRANSFORM = "count-smoothed-idf"
UNSEEN = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
SKEWS = (10.0, 2.0, 0.5, 0.2)
"""Concentrations of the Dirichlet mix over the known domains: the smaller, the more skewed."""
PAYS_POINTS = 2.0
"""A refit pays where it wins this many points of union gain back."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One traffic: measures of its drift, and gains over JSQ in percent."""

    seed: int
    traffic: str
    outside: float
    distance_ks: float
    occupancy_tv: float
    gain_old: float
    gain_refitted: float

    @property
    def lost(self) -> float:
        """Points of gain that the old centroids miss."""
        return self.gain_refitted - self.gain_old


class TableLocality:
    """Cosines that were computed beforehand, by the prompt's number in `signature.tokens`."""

    def __init__(self, cosines: Rows) -> None:
        self._cosines = cosines
        self.clusters = cosines.shape[1]

    def similarities(self, signature: ExpertSignature) -> Rows | None:
        """See `eldr.routing.locality.Locality`."""
        row: Rows = self._cosines[signature.tokens]
        return row


def numbered(request: int) -> ExpertSignature:
    """A signature without counts whose `tokens` is the request's number."""
    return ExpertSignature("", 1, request, 0, np.zeros((1, 1), np.uint32))


def union_met(
    steps: npt.NDArray[Any], placed: Sequence[Sequence[int]], rng: np.random.Generator, samples: int
) -> float:
    """Distinct experts per layer that the mean request's decoder touches in one step.

    `steps` [requests, steps, layers, picks] are expert ids, `placed` the requests on each decoder, each at a random
    step; the mean over `samples` draws of the steps.
    """
    layers = steps.shape[2]
    met = 0.0
    total = sum(len(requests) for requests in placed)
    for requests in placed:
        if not requests:
            continue
        at = rng.integers(steps.shape[1], size=(samples, len(requests)))
        picks = steps[np.asarray(requests)[None, :], at]  # [samples, requests, layers, picks]
        touched = np.zeros((samples, layers, int(steps.max()) + 1), dtype=np.bool_)
        sample, layer = np.arange(samples)[:, None, None, None], np.arange(layers)[None, None, :, None]
        touched[sample, layer, picks] = True
        met += len(requests) * float(touched.sum()) / (samples * layers)
    return met / total


def serve(
    policy: Policy, arrivals: Ints, steps: npt.NDArray[Any], decoders: int, in_flight: int, seed: int
) -> float:
    """Mean of `union_met` over a closed system of `decoders` * `in_flight` requests, the first round left out."""
    ends, steps_drawn = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    names = [f"d{i:03}" for i in range(decoders)]
    placed: list[list[int]] = [[] for _ in names]
    order: list[tuple[int, int]] = []
    met = []
    for turn, request in enumerate(arrivals.tolist()):
        if len(order) == decoders * in_flight:
            # One of the older half ends; which one depends on the turn alone, so that all policies see the same.
            home, ended = order.pop(int(ends.integers(len(order) // 2)))
            placed[home].remove(ended)
        fleet = tuple(
            DecoderView(name, DecoderState(name, "1", sequence=1, running=len(requests)))
            for name, requests in zip(names, placed, strict=True)
        )
        decision = policy.select(DecodeRequest(f"r{turn}", numbered(request)), fleet)
        home = names.index(decision.worker_id)
        placed[home].append(request)
        order.append((home, request))
        if turn >= 2 * decoders * in_flight and turn % 16 == 0:
            met.append(union_met(steps, placed, steps_drawn, 4))
    return float(np.mean(met))


def mixes(
    known: Sequence[str], unseen: Sequence[str], rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Share per domain of every traffic, by name."""
    out = {}
    for share in UNSEEN:
        out[f"unseen {share:.0%}"] = {
            **dict.fromkeys(known, (1 - share) / len(known)),
            **dict.fromkeys(unseen, share / len(unseen)),
        }
    for skew in SKEWS:
        shares = rng.dirichlet(np.full(len(known), skew))
        out[f"skew {skew:g}"] = dict(zip(known, shares.tolist(), strict=True))
    return out


def drawn(mix: Mapping[str, float], pool: Mapping[str, Ints], size: int, rng: np.random.Generator) -> Ints:
    """Requests of a mix, int64 [size], with repetition."""
    names = list(mix)
    shares = np.array(list(mix.values()))
    domains = rng.choice(len(names), size, p=shares / shares.sum())
    return np.array([rng.choice(pool[names[domain]]) for domain in domains], dtype=np.int64)


def one_seed(counts: Counts, seed: int, decoders: int, in_flight: int, placements: int) -> list[Outcome]:
    """Every traffic of one choice of known domains."""
    rng = np.random.default_rng(seed)
    domains = sorted(set(counts.domains))
    shuffled = rng.permutation(domains).tolist()
    known, unseen = shuffled[: (len(domains) + 1) // 2], shuffled[(len(domains) + 1) // 2 :]
    teach: dict[str, Ints] = {}
    live: dict[str, Ints] = {}
    for domain in domains:
        mine = rng.permutation(np.flatnonzero(np.asarray(counts.domains) == domain))
        teach[domain], live[domain] = mine[::2], mine[1::2]
    fitted_on = np.concatenate([teach[domain] for domain in known])
    transform = transform_named(TRANSFORM)
    weights = transform.learn(counts.prefill_counts[fitted_on])
    rows = unit_rows(transform.weigh(counts.prefill_counts, weights), range(counts.layers)).rows
    found = spherical_kmeans(rows[fitted_on], decoders, seed=seed)
    kept = baseline(rows[fitted_on], found.centroids)
    record = ClusterRecord(
        *(found.sizes, True, found.objective, found.iterations, found.converged, found.distinct),
        *(kept.distances, kept.nearest),
    )
    assert counts.decode_ids is not None
    out = []
    for name, mix in mixes(known, unseen, rng).items():
        names = [f"d{i:03}" for i in range(decoders)]
        window = rows[drawn(mix, teach, 500, rng)]
        refit = Refitter().refit(window, Centroids(found.centroids), names)
        assert refit.centroids is not None
        refitted = owned_rows(refit.centroids, names, rows.shape[1])
        arrivals = drawn(mix, live, placements, rng)
        policies = (
            JoinShortestQueue(seed),
            LocalityBand(TableLocality(rows @ found.centroids.T), seed=seed),
            LocalityBand(TableLocality(rows @ np.stack([refitted[name] for name in names]).T), seed=seed),
        )
        base, old, new = (
            serve(policy, arrivals, counts.decode_ids, decoders, in_flight, seed) for policy in policies
        )
        measured = drift(rows[drawn(mix, live, 500, rng)], found.centroids, record)
        out.append(
            Outcome(
                seed,
                name,
                measured.outside,
                measured.distance_ks,
                measured.occupancy_tv,
                100 * (1 - old / base),
                100 * (1 - new / base),
            )
        )
    return out


@dataclass(frozen=True, slots=True)
class Limits:
    """A rule: a refit pays where outside is above its limit or the total variation above its own."""

    outside: float
    occupancy_tv: float

    def right(self, outcomes: Sequence[Outcome], pays_points: float = PAYS_POINTS) -> float:
        """Share of the traffics that the rule judges as the gain does."""
        verdicts = [o.outside > self.outside or o.occupancy_tv > self.occupancy_tv for o in outcomes]
        pays = [o.lost >= pays_points for o in outcomes]
        return sum(v == p for v, p in zip(verdicts, pays, strict=True)) / len(outcomes)


def best_limits(outcomes: Sequence[Outcome], pays_points: float = PAYS_POINTS) -> Limits:
    """The pair of limits, on a grid of 0.05, that is right most often; of equals the middle one."""
    grid = [round(0.05 * step, 2) for step in range(1, 20)]
    scored = [
        (limits.right(outcomes, pays_points), limits) for limits in (Limits(a, b) for a in grid for b in grid)
    ]
    best = max(right for right, _ in scored)
    equal = [limits for right, limits in scored if right == best]
    return equal[len(equal) // 2]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("counts", type=Path, help="counts file with domains and decode_ids")
    parser.add_argument("--decoders", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=16, help="requests per decoder")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one seed, few placements")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = load_counts(arguments.counts)
    if counts.decode_ids is None or not any(counts.domains):
        parser.error("the counts need domains and single decode steps (decode_ids)")
    seeds, placements = (1, 600) if arguments.quick else (arguments.seeds, 1_200)
    outcomes: list[Outcome] = []
    print("seed traffic        outside     ks     tv   gain old   refitted   lost")
    for seed in range(seeds):
        for each in one_seed(counts, seed, arguments.decoders, arguments.in_flight, placements):
            outcomes.append(each)
            print(
                f"{seed:4} {each.traffic:14} {each.outside:7.3f} {each.distance_ks:6.3f} {each.occupancy_tv:6.3f}"
                f" {each.gain_old:8.1f} % {each.gain_refitted:8.1f} % {each.lost:6.1f}",
                flush=True,
            )
    taught = [outcome for outcome in outcomes if outcome.seed % 2 == 0]
    judged = [outcome for outcome in outcomes if outcome.seed % 2] or taught
    limits, shipped = best_limits(taught), Limits(OUTSIDE_LIMIT, OCCUPANCY_LIMIT)
    for name, rule in (("best on even seeds", limits), ("shipped", shipped)):
        print(
            f"{name}: a refit pays (at least {PAYS_POINTS:g} points) where outside > {rule.outside:g} or tv > "
            f"{rule.occupancy_tv:g}; right in {rule.right(taught):.0%} of {len(taught)} traffics of even seeds, "
            f"{rule.right(judged):.0%} of {len(judged)} of odd seeds"
        )
    if arguments.json:
        result = {
            "outcomes": [asdict(outcome) | {"lost": outcome.lost} for outcome in outcomes],
            "limits": asdict(limits) | {"right": limits.right(judged)},
            "shipped": asdict(shipped) | {"right": shipped.right(judged)},
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

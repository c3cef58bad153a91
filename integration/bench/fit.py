"""How long a fit takes and how much memory, against the replicated-slot Hungarian method.

    python -m integration.bench fit [--json FILE]

A fit here is what `eldr fit` does once transform and layers are chosen: weights learned and applied to counts of
48 layers x 128 experts, unit rows, balanced K-means with 8 restarts. Each cell runs in a process of its own; memory
is that process's peak, the counts included. The reference is the same fit with each assignment solved by
scipy.optimize.linear_sum_assignment over replicated slots; where its square matrix or its time would be too large
there is none. `objective_gap`: how far the cost of the last assignment is from the reference's optimum of the same
costs, relative. The greedy layer selection runs over 1,000 requests and 30,000 pairs.

Floor of (20,000, 64): 15.7 GFLOP per iteration for the cosines of 0.5 GB of rows, 0.12 s on two cores with AVX-512,
that is about 3 s for the 28 iterations; the means read only the rows that moved. Writing weighted counts and unit
rows once each is 1 GB more. The assignment reads 10 MB of costs per step of its prices, 30 steps per iteration.
"""

import argparse
import json
import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eldr.calibration import assignment, kmeans
from eldr.calibration.assignment import Assignment
from eldr.signature.quality import pair_products, request_pairs, select_layers
from eldr.signature.transform import transform_named, unit_rows

LAYERS, EXPERTS, TOP_K = 48, 128, 8
CELLS = ((1_000, 16), (4_000, 32), (20_000, 64))
QUICK = ((300, 4), (600, 8))
REFERENCE_UP_TO = 4_000
"""Rows of the largest cell that the reference runs: 0.13 GB and 8 s for each assignment."""
PROMPT_TOKENS = 200
DOMAINS = 24
GREEDY = (1_000, 30_000)
GOALS_S = {1_000: 3.0, 4_000: 8.0, 20_000: 30.0}


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured fit."""

    n: int
    k: int
    seconds: float
    peak_bytes: int
    objective_gap: float | None


def synthetic_counts(requests: int, seed: int = 0, domains: int = DOMAINS) -> npt.NDArray[np.uint8]:
    """Counts of requests of unequal domains, uint8 [requests, LAYERS, EXPERTS].

    A layer sums to about PROMPT_TOKENS * TOP_K.
    """
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(domains, 1.0))
    domain = rng.choice(domains, requests, p=shares)
    liking = np.exp(rng.normal(0, 1.2, (domains, LAYERS, EXPERTS)))
    counts = np.empty((requests, LAYERS, EXPERTS), np.uint8)
    for request in range(requests):
        rate = liking[domain[request]] * rng.gamma(2.0, 0.5, (LAYERS, EXPERTS))
        rate *= PROMPT_TOKENS * TOP_K / rate.sum(axis=1, keepdims=True)
        counts[request] = np.minimum(rng.poisson(rate), 255)
    return counts


def slots_assignment(costs: npt.NDArray[np.float64], least: Any, most: Any, prices: Any = None) -> Assignment:
    """`optimal_assignment` by a Hungarian solve over replicated slots."""
    from scipy.optimize import linear_sum_assignment

    clusters = costs.shape[1]
    low, high = (np.broadcast_to(sizes, clusters) for sizes in (least, most))
    owners = np.concatenate([np.repeat(np.arange(clusters), low), np.repeat(np.arange(clusters), high - low)])
    square = np.zeros((len(owners), len(owners)))
    square[: len(costs)] = costs[:, owners]
    square[len(costs) :, : low.sum()] = np.abs(costs).sum() * 10 + 1
    _, slots = linear_sum_assignment(square)
    labels = owners[slots[: len(costs)]]
    return Assignment(labels, float(costs[np.arange(len(costs)), labels].sum()), np.zeros(clusters))


class Recorder:
    """Stands in for the assignment and keeps its last problem and cost."""

    def __init__(self, solve: Any) -> None:
        self._solve = solve
        self.last: tuple[Any, Any, Any] | None = None
        self.cost = 0.0

    def __call__(self, costs: Any, least: Any, most: Any, prices: Any = None) -> Assignment:
        found: Assignment = self._solve(costs, least, most, prices)
        self.last, self.cost = (costs, least, most), found.cost
        return found


def relative_gap(recorder: Recorder) -> float:
    """How far the last recorded cost is from the optimum of the same problem, as a share of it."""
    if recorder.last is None:
        raise ValueError("nothing was assigned")
    best = slots_assignment(*recorder.last).cost
    return abs(recorder.cost - best) / max(abs(best), 1e-300)


def measured_fit(n: int, k: int, by_slots: bool, with_gap: bool) -> Cell:
    """One fit, in this process."""
    counts = synthetic_counts(n)
    recorder = Recorder(slots_assignment if by_slots else assignment.optimal_assignment)
    kmeans.optimal_assignment = recorder
    transform = transform_named("count-idf")
    begin = time.perf_counter()
    weighted = transform.weigh(counts, transform.learn(counts))
    rows = unit_rows(weighted, range(LAYERS)).rows
    del weighted
    kmeans.spherical_kmeans(rows, k)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gap = None
    if with_gap:
        gap = relative_gap(recorder)
    return Cell(n, k, round(seconds, 3), peak, gap)


def in_a_process(function: Any, *arguments: Any) -> Any:
    """Runs it in a new process, so that its memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def greedy_seconds(requests: int, pairs: int) -> float:
    """Layer selection by `select_layers`, pair products included."""
    prefill, decode = synthetic_counts(requests, 1), synthetic_counts(requests, 2)
    transform = transform_named("count-idf")
    weighted = transform.weigh(prefill, transform.learn(prefill))
    begin = time.perf_counter()
    chosen = request_pairs(requests, pairs, 0)
    distances = pair_products(decode, chosen).distances(range(LAYERS))
    select_layers(pair_products(weighted, chosen), distances)
    return round(time.perf_counter() - begin, 3)


def table(result: dict[str, Any]) -> Table:
    """The figures as people read them."""
    out = Table("requests", "clusters", "seconds", "goal", "peak", "gap", "Hungarian")
    references = {cell["n"]: cell for cell in result["reference"]}
    for cell in result["fit"]:
        reference = references.get(cell["n"])
        out.add_row(
            f"{cell['n']:,}",
            str(cell["k"]),
            f"{cell['seconds']:.2f}",
            f"{GOALS_S.get(cell['n'], float('nan')):.0f}",
            f"{cell['peak_bytes'] / 1e9:.2f} GB",
            "-" if cell["objective_gap"] is None else f"{cell['objective_gap']:.1e}",
            "-" if reference is None else f"{reference['seconds']:.1f} s",
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small cells: does it run? No figures")
    parser.add_argument(
        "--no-reference", action="store_true", help="without the Hungarian method, which takes minutes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    cells = QUICK if given.quick else CELLS
    fits, references = [], []
    for n, k in track(cells, "fits", console=Console(stderr=True)):
        small = n <= REFERENCE_UP_TO
        fits.append(asdict(in_a_process(measured_fit, n, k, False, small)))
        if small and not given.no_reference:
            references.append(asdict(in_a_process(measured_fit, n, k, True, False)))
    greedy = GREEDY if not given.quick else (100, 1_000)
    result = {"fit": fits, "reference": references, "greedy_seconds": in_a_process(greedy_seconds, *greedy)}
    Console().print(table(result))
    Console().print(
        f"greedy selection, {greedy[0]:,} requests, {greedy[1]:,} pairs: {result['greedy_seconds']} s (goal 5)"
    )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

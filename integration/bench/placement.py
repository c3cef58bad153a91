"""Largest number of activated experts on a rank, replayed: planners under both replica choices.

    python -m integration.bench placement TRACE.npz ... [--quick] [--json FILE]

A trace is an npz with `expert_ids` [tokens, layers, top_k] and `offsets` (request i is rows offsets[i] to
offsets[i + 1]), or a counts file with `decode_ids`. Files whose names share the part before the first `_` are one
trace. Each trace's requests are halved: plans are made on steps drawn from one half, and steps of the other are
replayed. A step is a batch of tokens at random places of random requests; `pure` batches come from one domain (a
request's label, else its file), planned for that domain, and are the mean over the largest domains.

`even_split` is the mean of ceil(activated / ranks), which no placement beats. Without redundant slots both choices are
the same. `linear` in a goal is the plan without redundant slots.
"""

import argparse
import itertools
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.placement import PLANNERS, REPLICA_CHOICES, Demand, Geometry, PlanSettings, plan
from eldr.placement.replay import activated_of, even_split, use_by_hash, use_fewest_activated

IdArray = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Trace:
    """requests: picks [tokens, layers, top_k] of each; domains: one label each."""

    experts: int
    requests: list[IdArray] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)


def load(paths: list[Path]) -> dict[str, Trace]:
    """Traces by name."""
    traces: dict[str, Trace] = {}
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            if "expert_ids" in file:
                ids, offsets = file["expert_ids"], file["offsets"]
                requests = [ids[a:b] for a, b in itertools.pairwise(offsets)]
                labels = [path.stem] * len(requests)
                if "meta" in file:
                    meta = json.loads(str(file["meta"]))
                    labels = [str(row.get("domain", path.stem)) for row in meta]
                experts = int(file["experts"])
            else:
                requests, labels = list(file["decode_ids"]), [str(label) for label in file["domain"]]
                experts = int(file["prefill_counts"].shape[2])
        name = path.stem.split("_")[0]
        trace = traces.setdefault(path.parent.name if name == "traces" else name, Trace(experts))
        kept = [index for index, rows in enumerate(requests) if len(rows)]
        trace.requests += [requests[index] for index in kept]
        trace.domains += [labels[index] for index in kept]
    return traces


def draw(
    trace: Trace, requests: list[int], steps: int, batch: int, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Picks [steps, batch, layers, top_k] of tokens at random places of random requests."""
    lengths = np.array([len(trace.requests[index]) for index in requests])
    chosen = rng.integers(len(requests), size=(steps, batch))
    at = (rng.random((steps, batch)) * lengths[chosen]).astype(np.int64)
    rows = np.concatenate([trace.requests[index] for index in requests])
    starts = np.cumsum(lengths) - lengths
    return rows[starts[chosen] + at]


def replay(planned: IdArray, replayed: IdArray, experts: int, ranks: int) -> list[dict[str, Any]]:
    """One row per redundancy, planner and choice."""
    layers, steps = planned.shape[2], activated_of(planned, experts).transpose(2, 0, 1)
    tokens = np.stack([np.bincount(planned[:, :, row].ravel(), minlength=experts) for row in range(layers)])
    demand = Demand.of_steps(np.ascontiguousarray(steps), tokens)
    activated = activated_of(replayed, experts)
    even = float(even_split(activated, ranks).mean())
    rows = []
    for share in (0.0, 1 / 8):
        geometry = Geometry.with_redundancy(experts, ranks, share)
        for planner in PLANNERS:
            started = time.perf_counter()
            maps = plan(demand, geometry, PlanSettings(planner)).maps
            seconds = time.perf_counter() - started
            for choice in REPLICA_CHOICES:
                if choice == "hash":
                    use = use_by_hash(replayed, maps, geometry)
                else:
                    use = use_fewest_activated(activated, maps, geometry)
                rows.append(
                    {
                        "ranks": ranks,
                        "redundant": geometry.redundant,
                        "planner": planner,
                        "replica_choice": choice,
                        "replayed_max": float(use.largest.mean()),
                        "even_split": even,
                        "seconds": seconds,
                    }
                )
    return rows


def measure(name: str, trace: Trace, batch: int, mix: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """The cells of one trace, batch, mix and number of ranks."""
    rng = np.random.default_rng(0)
    order = [int(index) for index in rng.permutation(len(trace.requests))]
    groups: dict[str, list[int]] = defaultdict(list)
    for index in order:
        groups["" if mix == "mixed" else trace.domains[index]].append(index)
    largest = sorted(groups.values(), key=len, reverse=True)[:3]
    found = []
    for group in largest:
        if len(group) < 2:
            continue
        half = len(group) // 2
        planned, replayed = (draw(trace, part, steps, batch, rng) for part in (group[:half], group[half:]))
        found.append(replay(planned, replayed, trace.experts, ranks))
    cells = []
    for rows in zip(*found, strict=True):
        means = {
            key: float(np.mean([row[key] for row in rows]))
            for key in ("replayed_max", "even_split", "seconds")
        }
        cells.append({"trace": name, "mix": mix, "batch": batch, **rows[0], **means})
    return cells


def judged(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The goals: the worst cell and the mean, in percent, over the cells with 4 and more ranks."""
    groups: dict[Any, dict[Any, dict[str, Any]]] = defaultdict(dict)
    for cell in cells:
        key = tuple(cell[name] for name in ("trace", "mix", "batch", "ranks"))
        groups[key][cell["redundant"] > 0, cell["planner"], cell["replica_choice"]] = cell
    against_eplb, against_linear, above_even, alone = {}, {}, {}, {}
    for key, found in groups.items():
        value = {name: cell["replayed_max"] for name, cell in found.items()}
        ours, base = value[True, "co-activation", "fewest-activated"], value[False, "linear", "hash"]
        alone[key] = 100 * (value[False, "co-activation", "hash"] / base - 1)
        if key[3] >= 4:
            against_eplb[key] = 100 * (ours / value[True, "token-balance", "hash"] - 1)
            against_linear[key] = 100 * (ours / base - 1)
            above_even[key] = 100 * (ours / found[False, "linear", "hash"]["even_split"] - 1)

    def worst(values: dict[Any, float]) -> dict[str, Any]:
        cell = max(values, key=values.__getitem__)
        return {
            "worst": values[cell],
            "worst_cell": list(cell),
            "mean": float(np.mean(list(values.values()))),
        }

    return {
        "against_token_balance_hash": worst(against_eplb)
        | {
            "cells_missing_12": sum(value > -12 for value in against_eplb.values()),
            "cells": len(against_eplb),
        },
        "against_linear": worst(against_linear)
        | {
            "cells_missing_5": sum(value > -5 for value in against_linear.values()),
            "cells": len(against_linear),
        },
        "above_even_split": worst(above_even),
        "without_redundant_against_linear": worst(alone)
        | {"cells_above": sum(value > 0 for value in alone.values()), "cells": len(alone)},
    }


def plan_seconds(ranks: int) -> float:
    """A plan of 94 layers x 128 experts on made-up steps, best of three."""
    rng = np.random.default_rng(0)
    steps = rng.random((96, 94, 128)) < rng.beta(1, 1.5, size=(94, 128))
    demand, geometry = Demand.of_steps(steps), Geometry.with_redundancy(128, ranks, 1 / 8)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        plan(demand, geometry)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=256, help="steps to plan on, and as many to replay")
    parser.add_argument("--quick", action="store_true", help="batch 16, 4 and 8 ranks only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batches, rank_counts = ((16,), (4, 8)) if options.quick else ((8, 16, 32), (2, 4, 8, 16))
    cells: list[dict[str, Any]] = []
    for name, trace in load(options.traces).items():
        for mix in ("mixed", "pure"):
            for batch in batches:
                for ranks in rank_counts:
                    cells += measure(name, trace, batch, mix, ranks, options.steps)
                    ours, eplb = cells[-1], cells[-6]
                    print(
                        f"{name:8} {mix:6} batch {batch:2} ranks {ranks:2}: even {ours['even_split']:6.2f}  "
                        f"co-activation + fewest-activated {ours['replayed_max']:6.2f}  "
                        f"{eplb['planner']} + {eplb['replica_choice']} {eplb['replayed_max']:6.2f}  "
                        f"linear {cells[-16]['replayed_max']:6.2f}",
                        flush=True,
                    )
    goals = judged(cells)
    seconds = {str(ranks): plan_seconds(ranks) for ranks in (4, 8, 16, 32)}
    print(json.dumps(goals, indent=2))
    print("seconds to plan 94 x 128:", seconds)
    if options.json:
        result = {"cells": cells, "goals": goals, "plan_seconds_94x128": seconds}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

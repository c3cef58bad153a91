"""The simulator against a real cluster: TPOT P50 and experts per step of an `eldr demo` run, measured and simulated.

    python -m integration.bench cluster_validation DEMO.json --counts COUNTS.npz [--seeds N] [--quick] [--json FILE]

DEMO.json is what `eldr demo --json` wrote: its workload (decoders, requests in flight, prompts, tokens) is simulated
under each of its policies. COUNTS.npz holds requests of the same model, those of the run (`eldr demo --work-dir DIR`
leaves DIR/counts.npz) or the testbed's traces; with single decode steps in it unions are exact. The step-time model is
fitted to the run's own step samples of all policies together, and the median wait for the first token is taken from the
run as a fixed delay: the simulator predicts batches, unions and times, not the engine's speed. A seed is a round.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from rich.console import Console
from rich.table import Table

from eldr.calibration.counts import Counts, CountsError
from eldr.calibration.counts_file import load_counts
from eldr.cli.simulate import PIPED_WIDTH
from eldr.simulator.closed_loop import ClosedLoop
from eldr.simulator.measures import Figures, figures_of
from eldr.simulator.runs import Requests, fitted
from eldr.simulator.simulation import Arrival, Topology
from eldr.simulator.world import RecordedWorld
from integration.bench._inputs import TESTBED
from integration.bench._published import StepFit
from integration.bench._published import fitted as fitted_step

TPOT_GOAL, UNION_GOAL = 0.10, 0.05
FEWEST_SAMPLES = 20
CALIBRATION = 208
FAST = 1e9


class ResultError(ValueError):
    """A demo's result that cannot be simulated."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Of a demo run; as its JSON names them."""

    prefill: int
    decode: int
    requests: int
    in_flight: int
    output_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One policy. Ratios are simulated over measured."""

    policy: str
    tpot_p50_measured_ms: float
    tpot_p50_simulated_ms: float
    tpot_ratio: float
    union_measured: float
    union_simulated: float
    union_ratio: float

    @property
    def within(self) -> tuple[bool, bool]:
        """TPOT within TPOT_GOAL, union within UNION_GOAL."""
        return abs(self.tpot_ratio - 1) <= TPOT_GOAL, abs(self.union_ratio - 1) <= UNION_GOAL


def workload_of(result: Mapping[str, Any]) -> Workload:
    """Raises ResultError where the run's eldr did not write it."""
    try:
        return Workload(**result["workload"])
    except (KeyError, TypeError) as error:
        raise ResultError(f"the result has no workload ({error}): run `eldr demo` of this version") from error


def step_fit(result: Mapping[str, Any]) -> StepFit:
    """The step-time model of all samples, weighted by steps. Raises ResultError for too few."""
    samples = [one for steps in result.get("step_samples", {}).values() for one in steps]
    if len(samples) < FEWEST_SAMPLES:
        raise ResultError(f"the result has {len(samples)} step samples, a fit needs {FEWEST_SAMPLES}")
    batches, unions, times, steps = (
        np.array([one[name] for one in samples], np.float64)
        for name in ("batch", "union", "step_ms", "steps")
    )
    return fitted_step(batches, unions, times, weights=steps)


def requests_of(world: RecordedWorld, domains: Sequence[str], workload: Workload, seed: int) -> Requests:
    """Domains in equal parts, shuffled, as the demo sends them."""
    rng = np.random.default_rng([seed, 1])
    names = [domains[i % len(domains)] for i in range(workload.requests)]
    rng.shuffle(names)
    prompts = world.draw(names, rng)
    arrivals = [Arrival(0.0, f"r{i}", each, workload.output_tokens) for i, each in enumerate(prompts)]
    calibration = world.calibration.draw([domains[i % len(domains)] for i in range(CALIBRATION)], rng)
    first = calibration[0].signature
    return Requests(tuple(arrivals), tuple(calibration), first.shape, first.top_k)


def simulated(
    policy: str,
    requests: Requests,
    workload: Workload,
    fit: StepFit,
    first_token_s: float,
    exact: bool,
    seed: int,
) -> Figures:
    """One round of a policy."""
    topology = Topology(
        prefill=workload.prefill,
        decode=workload.decode,
        step_time=fit.model,
        max_num_seqs=max(64, workload.in_flight),
        prefill_tokens_per_s=FAST,
        transfer_s=first_token_s,
        exact=exact,
    )
    band = policy.startswith("locality-band")
    loop = ClosedLoop(
        workload.in_flight,
        topology,
        policy,
        {},
        requests.shape,
        requests.top_k,
        profile=fitted(requests, workload.decode, seed) if band else None,
        seed=seed,
    )
    return figures_of(loop.run(requests.arrivals), 0.0, float("inf"))


def compared(
    result: Mapping[str, Any], counts: Counts, domains: Sequence[str], seeds: Sequence[int]
) -> tuple[StepFit, list[Row]]:
    """A row for each policy of the result. Raises ResultError, ValueError."""
    workload, fit = workload_of(result), step_fit(result)
    world = RecordedWorld(counts, routes=True)
    exact = counts.decode_ids is not None
    drawn = {seed: requests_of(world, domains, workload, seed) for seed in seeds}
    rows = []
    for policy, measured in result["policies"].items():
        tpot, union = measured["tpot_ms"]["p50"], measured["union_mean"]
        if tpot is None or union is None:
            raise ResultError(f"{policy} measured nothing")
        wait_s = max(0.0, measured["ttft_ms"]["p50"] - tpot) / 1e3
        runs = [simulated(policy, drawn[seed], workload, fit, wait_s, exact, seed) for seed in seeds]
        found_tpot = float(np.mean([run.tpot_p50_ms for run in runs]))
        found_union = float(np.mean([run.union for run in runs]))
        rows.append(Row(policy, tpot, found_tpot, found_tpot / tpot, union, found_union, found_union / union))
    return fit, rows


def table(rows: Sequence[Row]) -> Table:
    """One row a policy."""
    out = Table(title="real cluster against the simulator")
    out.add_column("policy", no_wrap=True)
    for heading in ("TPOT P50 ms", "simulated", "ratio", "experts", "simulated", "ratio"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        tpot, union = row.within
        out.add_row(
            row.policy,
            f"{row.tpot_p50_measured_ms:.1f}",
            f"{row.tpot_p50_simulated_ms:.1f}",
            f"{row.tpot_ratio:.3f}{'' if tpot else ' NO'}",
            f"{row.union_measured:.1f}",
            f"{row.union_simulated:.1f}",
            f"{row.union_ratio:.3f}{'' if union else ' NO'}",
        )
    return out


def demo_domains(counts: Counts) -> list[str]:
    """The domains of the demo's prompts that the counts have."""
    lines = (TESTBED / "prompts/evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted({json.loads(line)["domain"] for line in lines} & set(counts.domains))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, metavar="DEMO.json", help="what `eldr demo --json` wrote")
    parser.add_argument("--counts", type=Path, required=True, help="counts of requests of the same model")
    parser.add_argument("--seeds", type=int, default=3, help="simulated rounds of each policy (3)")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--json", type=Path, help="write model, rows and goals here")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {arguments.seeds}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        result = json.loads(arguments.result.read_text(encoding="utf-8"))
        counts = load_counts(arguments.counts)
        domains = demo_domains(counts)
        if not domains:
            raise ResultError(f"{arguments.counts} has none of the demo's domains")
        fit, rows = compared(result, counts, domains, range(1 if arguments.quick else arguments.seeds))
    except (CountsError, OSError, ValueError) as error:
        sys.exit(str(error))
    shown = Console()
    if not shown.is_terminal:
        shown = Console(width=PIPED_WIDTH)
    shown.print(table(rows))
    model, off = fit.model, 100 * float(np.mean(np.abs(fit.errors)))
    shown.print(
        f"step time {model.base_ms:.2f} + {model.per_request_ms:.3f} n + {model.per_expert_ms:.3f} U ms, "
        f"mean error {off:.1f} % over {len(fit.errors)} samples; goals: TPOT within {TPOT_GOAL:.0%}, "
        f"union within {UNION_GOAL:.0%}"
    )
    if arguments.json:
        data = {
            "step_time": {
                name: getattr(model, name) for name in ("base_ms", "per_request_ms", "per_expert_ms")
            },
            "step_time_mean_error_percent": off,
            "policies": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

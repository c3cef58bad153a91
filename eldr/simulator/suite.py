"""Many runs on several processes: every policy of a scenario over several seeds."""

import concurrent.futures
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from eldr.simulator.runs import Run, requests_of, simulate, world_of
from eldr.simulator.scenario import Scenario

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run_all(
    scenario: Scenario,
    folder: Path,
    policies: Sequence[str],
    seeds: Sequence[int],
    jobs: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    moments: int = 0,
) -> list[Run]:
    """Every policy over every seed, in that order; a process simulates some of the policies of one seed.

    `folder` is where a counts file is looked for, `jobs` the processes at a time, `moments`
    those of the clairvoyant bound (see `simulate`). Raises what a run raises.
    """
    total = len(seeds) * len(policies)
    found: dict[tuple[str, int], Run] = {}
    if jobs == 1:
        world = world_of(scenario, folder)
        for seed in seeds:
            requests = requests_of(scenario, world, seed)
            for policy in policies:
                found[policy, seed] = Run(policy, seed, simulate(scenario, requests, policy, seed, moments))
                progress(len(found), total)
    else:
        before = {name: os.environ.get(name) for name in _ONE_THREAD}
        os.environ.update(_ONE_THREAD)
        try:
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(jobs, context, _quiet) as pool:
                # Requests are drawn once per process and seed, not once per policy.
                shares = [policies[first::jobs] for first in range(min(jobs, len(policies)))]
                futures = [
                    pool.submit(_some, scenario, folder, share, seed, moments)
                    for seed in seeds
                    for share in shares
                ]
                for future in concurrent.futures.as_completed(futures):
                    for run in future.result():
                        found[run.policy, run.seed] = run
                    progress(len(found), total)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    return [found[policy, seed] for policy in policies for seed in seeds]


def _some(scenario: Scenario, folder: Path, policies: Sequence[str], seed: int, moments: int) -> list[Run]:
    requests = requests_of(scenario, world_of(scenario, folder), seed)
    return [Run(policy, seed, simulate(scenario, requests, policy, seed, moments)) for policy in policies]


def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

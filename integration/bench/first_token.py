"""What `eldr gateway --first-token-from-prefill` takes off the time to first token.

    python -m integration.bench first_token [--rounds 30] [--json FILE]

One prefill and two decode servers with real NIXL transfer serve the testbed model, its experts inflated to width
2048, behind one router and two gateways: an ordinary one and one with the option. Rounds alternate between the
gateways in random order; a round sends as many greedy completions at once as `in_flight` says, each with a prompt
that no server has seen. Figures: median seconds to the first and the second token of either way, and the ratio of
the medians (with / without) with its 95 % bootstrap interval over rounds.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eldr.cluster.local import FleetConfig, LocalFleet
from eldr.cluster.ports import LOOPBACK, free_ports
from eldr.cluster.readiness import port_ready
from eldr.cluster.supervisor import Command
from eldr.cluster.vllm_server import EngineSettings
from eldr.demo.client import Completion, Request, send_all
from integration.bench._inputs import inflated_testbed, prompts_of_length

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 12
IN_FLIGHT = (1, 6)
WARM_UP = 2
RESAMPLES = 2000
WAYS = ("ordinary", "first-token")


def ratio_interval(without: list[float], with_option: list[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of two medians, resampled independently."""
    rng = np.random.default_rng(seed)
    medians = [
        np.median(np.asarray(values)[rng.integers(0, len(values), (RESAMPLES, len(values)))], axis=1)
        for values in (without, with_option)
    ]
    low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    return float(low), float(high)


def start_second_gateway(fleet: LocalFleet) -> str:
    """The gateway with the option, beside the fleet's own."""
    listen = f"{LOOPBACK}:{free_ports(1)[0]}"
    words = ("gateway", f"--listen={listen}", f"--router={fleet.layout.router_address}")
    command = (sys.executable, "-m", "eldr.cli.main", *words, "--first-token-from-prefill")
    fleet.supervisor.start(Command("gateway-first-token", command))
    fleet.supervisor.wait_ready("gateway-first-token", port_ready(listen), 60)
    return f"http://{listen}"


def one_round(url: str, prompts: Iterator[list[int]], in_flight: int, number: int) -> list[Completion]:
    """Sends `in_flight` completions at once; ends the benchmark where one fails."""
    requests = [
        Request(
            f"{number}-{i}",
            "",
            {
                "model": "m",
                "prompt": next(prompts),
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        for i in range(in_flight)
    ]
    answers = asyncio.run(send_all(url, requests, in_flight, 120.0))
    for answer in answers:
        if answer.error:
            sys.exit(f"first_token: request {answer.request_id} failed: {answer.error}")
    return answers


def measured(model: Path, rounds: int, seed: int, console: Console) -> dict[str, Any]:
    """Figures by number of requests in flight."""
    order = random.Random(seed)
    prompts = prompts_of_length(model, PROMPT_TOKENS, seed)
    engine = EngineSettings(model=str(model), dtype="bfloat16", max_num_seqs=16, kv_cache_mib=128)
    result: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalFleet(FleetConfig(engine=engine, prefill=1, decode=2), Path(folder), console.print) as fleet,
    ):
        fleet.start_router("--policy=jsq")
        fleet.start_servers()
        urls = dict(zip(WAYS, (fleet.start_gateway(), start_second_gateway(fleet)), strict=True))
        for in_flight in IN_FLIGHT:
            seen: dict[str, list[Completion]] = {way: [] for way in WAYS}
            for turn in track(range(WARM_UP + rounds), f"rounds of {in_flight}", console=console):
                for way in order.sample(WAYS, 2):
                    answers = one_round(urls[way], prompts, in_flight, turn)
                    if turn >= WARM_UP:
                        seen[way] += answers
            result[str(in_flight)] = figures(seen)
    return result


def figures(seen: dict[str, list[Completion]]) -> dict[str, Any]:
    """Medians in seconds and the ratio of both ways."""
    first = {way: [answer.first_s for answer in answers] for way, answers in seen.items()}
    whole = {way: [answer.last_s for answer in answers] for way, answers in seen.items()}
    ordinary, option = (first[way] for way in WAYS)
    low, high = ratio_interval(ordinary, option)
    return {
        "requests": len(ordinary),
        "ttft_s": {way: round(statistics.median(values), 5) for way, values in first.items()},
        "last_token_s": {way: round(statistics.median(values), 5) for way, values in whole.items()},
        "ttft_ratio": round(statistics.median(option) / statistics.median(ordinary), 4),
        "ttft_ratio_low": round(low, 4),
        "ttft_ratio_ci": round(high, 4),
    }


def table(result: dict[str, Any]) -> Table:
    """The figures as people read them."""
    out = Table(
        "in flight", "TTFT ordinary", "TTFT with option", "ratio", "95 % interval", "last token, ratio"
    )
    for in_flight, row in result.items():
        ordinary, option = (row["ttft_s"][way] for way in WAYS)
        ends = [row["last_token_s"][way] for way in WAYS]
        out.add_row(
            in_flight,
            f"{ordinary * 1e3:.0f} ms",
            f"{option * 1e3:.0f} ms",
            f"{row['ttft_ratio']:.3f}",
            f"{row['ttft_ratio_low']:.3f} to {row['ttft_ratio_ci']:.3f}",
            f"{ends[1] / ends[0]:.3f}",
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each way (default 30)")
    parser.add_argument("--quick", action="store_true", help="3 rounds: does it run? No figures")
    parser.add_argument(
        "--model", type=Path, help="folder for the inflated model, kept (default: a temporary one)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = inflated_testbed((given.model or Path(scratch) / "testbed").absolute())
        result = measured(model, 3 if given.quick else given.rounds, given.seed, console)
    Console().print(table(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

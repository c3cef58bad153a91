"""How well prefill signatures predict decode, on a counts file: every figure that the paper gives of it.

    python -m integration.bench signature_quality COUNTS [--domains a,b,...] [--json FILE]

COUNTS is what `eldr calibrate` writes, with single decode steps (`decode_ids`) for the unions. Prints rho (Spearman
of signature distance against decode distance) per transform over all layers and over the greedy mask, both also on
requests that chose neither weights nor mask; the correlation of prefill and decode activation per expert; and the
distinct experts of a decode step whose batch is of one domain, against a mixed batch.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from eldr.calibration.choice import choose
from eldr.calibration.counts import Counts
from eldr.calibration.counts_file import load_counts
from eldr.calibration.views import prefill_decode
from eldr.signature.transform import TRANSFORMS

BATCHES = (8, 16, 32)
DRAWS = 400


def step_union(ids: npt.NDArray[Any]) -> float:
    """Distinct experts per layer of one step, mean over layers; ids [requests, layers, top_k]."""
    layers = ids.shape[1]
    return sum(len(np.unique(ids[:, layer])) for layer in range(layers)) / layers


def union_change(counts: Counts, rows: npt.NDArray[np.int64], batch: int, seed: int) -> float | None:
    """Mean union of same-domain batches over that of mixed ones, less 1; each request at a random step.

    A same-domain batch is of a domain drawn evenly, a mixed one of requests of `rows` drawn evenly. None where no
    domain fills a batch.
    """
    assert counts.decode_ids is not None
    assert counts.decode_len is not None
    rng = np.random.default_rng(seed)
    domains = np.array(counts.domains)
    by_domain = {name: rows[domains[rows] == name] for name in np.unique(domains[rows])}
    large = [members for members in by_domain.values() if len(members) >= batch]
    if not large:
        return None

    def mean_union(groups: Sequence[npt.NDArray[np.int64]]) -> float:
        unions = []
        for _ in range(DRAWS):
            group = groups[int(rng.integers(len(groups)))]
            chosen = rng.choice(group, batch, replace=False)
            steps = (rng.random(batch) * counts.decode_len[chosen]).astype(np.int64)
            unions.append(step_union(counts.decode_ids[chosen, steps]))
        return float(np.mean(unions))

    return mean_union(large) / mean_union([rows]) - 1


def measured(counts: Counts, domains: Sequence[str], seed: int, pairs: int) -> dict[str, Any]:
    """All figures by name."""
    known = np.array(counts.domains)
    rows = np.flatnonzero((counts.decode_tokens > 0) & (np.isin(known, domains) if domains else True))
    if not rows.size:
        raise SystemExit(f"no request with decode counts of {', '.join(domains)}")
    sums = {"gate_probability": counts.gate_probability, "gate_logit": counts.gate_logit}
    choice = choose(
        counts.prefill_counts[rows],
        counts.decode_counts[rows],
        tuple(TRANSFORMS),
        gates={name: array[rows] for name, array in sums.items() if array is not None},
        select=True,
        held_out=0.3,
        max_pairs=pairs,
        seed=seed,
    )
    finite = prefill_decode(counts.prefill_counts[rows], counts.decode_counts[rows]).correlations
    unions: dict[str, float] = {}
    if counts.decode_ids is not None and len(set(known[rows])) > 1:
        changes = {batch: union_change(counts, rows, batch, seed) for batch in BATCHES}
        unions = {str(batch): round(change, 4) for batch, change in changes.items() if change is not None}
    return {
        "requests": int(rows.size),
        "domains": sorted(set(known[rows].tolist())),
        "rho": [asdict(quality) for quality in choice.qualities],
        "chosen": choice.sentence,
        "correlation": {
            "mean": round(float(finite.mean()), 4),
            "p10": round(float(np.percentile(finite, 10)), 4),
            "p90": round(float(np.percentile(finite, 90)), 4),
        },
        "union_change": unions,
    }


def table(result: dict[str, Any]) -> Table:
    """rho per transform."""
    out = Table("transform", "rho, all layers", "held out", "held out, mask", "layers in mask")
    for row in result["rho"]:
        out.add_row(
            row["transform"],
            f"{row['rho']:.3f}",
            f"{row['held_out_rho']:.3f}",
            f"{row['held_out_mask_rho']:.3f}" if row["order"] else "-",
            str(len(row["mask"])) if row["order"] else "-",
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("counts", type=Path)
    parser.add_argument("--domains", default="", help="only requests of these domains, separated by commas")
    parser.add_argument("--pairs", type=int, default=100_000, help="request pairs of a rho (default 100,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    domains = tuple(filter(None, given.domains.split(",")))
    result = measured(load_counts(given.counts), domains, given.seed, given.pairs)
    console = Console()
    console.print(table(result))
    console.print(f"{result['requests']} requests; chosen: {result['chosen']}", soft_wrap=True)
    spread = result["correlation"]
    console.print(
        f"prefill-decode correlation per expert: {spread['mean']:.3f} ({spread['p10']:.3f} to {spread['p90']:.3f})"
    )
    for batch, change in result["union_change"].items():
        console.print(f"same-domain against mixed union, batch {batch}: {change:+.1%}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Recorded routes as scenarios of the policies benchmark: the testbed's traces and public ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.calibration.counts import Counts, tally
from eldr.calibration.counts_file import load_counts, save_counts
from eldr.simulator.scenario import Scenario, scenario_of

PREFILL_TOKENS = 48
"""First tokens of a public trace that stand for its prompt, which is not recorded."""
LEAST_DECODE = 16

TASKS = ("c", "coq", "javascript", "legal", "medical", "metamath", "python")
"""The testbed's domains that are no languages."""


def prepared(source: Path, folder: Path) -> list[Scenario]:
    """Scenarios of a trace file, or of every public trace of a folder; counts files are written to `folder`.

    Public traces (`expert_ids` [tokens, layers, top_k], `offsets` [requests + 1]) of one model are taken together.
    Raises ValueError for what is neither.
    """
    files = sorted(source.glob("*.npz")) if source.is_dir() else [source]
    if not files:
        raise ValueError(f"{source} has no .npz files")
    groups: dict[str, list[Path]] = {}
    for file in files:
        groups.setdefault(file.stem.partition("_")[0], []).append(file)
    made: list[Scenario] = []
    for name, members in groups.items():
        target = folder / f"{name}.npz"
        if _is_public(members[0]):
            counts = public_counts({file.stem: dict(_arrays(file)) for file in members})
        else:
            counts = load_counts(members[0])
        save_counts(counts, target)
        made += scenarios_of(name, counts, target.name)
    return made


def public_counts(traces: Mapping[str, Mapping[str, npt.NDArray[Any]]]) -> Counts:
    """Counts with single decode steps of public traces by file name.

    The first `PREFILL_TOKENS` rows of a request stand for its prompt, the others are its decode steps; a request with
    fewer than `LEAST_DECODE` of them is left out. Domains are those of `meta`, else the last word of the file name.
    """
    ids, domains, prefill, decode = [], [], [], []
    experts = 1 + max(int(trace["expert_ids"].max()) for trace in traces.values())
    for name, trace in traces.items():
        meta = json.loads(str(trace["meta"])) if "meta" in trace else []
        for number, (start, end) in enumerate(zip(trace["offsets"][:-1], trace["offsets"][1:], strict=True)):
            rows = trace["expert_ids"][start:end]
            if len(rows) < PREFILL_TOKENS + LEAST_DECODE:
                continue
            ids.append(f"{name}-{number}")
            labelled = number < len(meta) and isinstance(meta[number], dict) and "domain" in meta[number]
            domains.append(str(meta[number]["domain"]) if labelled else name.rpartition("_")[2])
            prefill.append(rows[:PREFILL_TOKENS])
            decode.append(rows[PREFILL_TOKENS:])
    if not ids:
        raise ValueError(f"no request has {PREFILL_TOKENS + LEAST_DECODE} tokens or more")
    lengths = np.array([len(rows) for rows in decode])
    steps = np.zeros((len(ids), int(lengths.max()), *decode[0].shape[1:]), np.uint8)
    for row, one in enumerate(decode):
        steps[row, : len(one)] = one
    prompt_len = np.full(len(ids), PREFILL_TOKENS)
    return Counts(
        ids=tuple(ids),
        fingerprint="",
        top_k=steps.shape[3],
        moe_layers=tuple(range(steps.shape[2])),
        prompt_len=prompt_len,
        prefill_counts=tally(np.stack(prefill), prompt_len, experts),
        decode_counts=tally(steps, lengths, experts),
        domains=tuple(domains),
        decode_ids=steps,
        decode_len=lengths,
    )


def scenarios_of(name: str, counts: Counts, file: str) -> list[Scenario]:
    """Exact scenarios with domains in proportion to their requests.

    Traces with the testbed's task domains make three: tasks, languages and all domains.
    """
    names = sorted(set(counts.domains))
    mixes = {name: names}
    if set(TASKS) < set(names):
        others = [domain for domain in names if domain not in TASKS]
        mixes = {f"{name}-tasks": list(TASKS), f"{name}-languages": others, f"{name}-all": names}
    step_time: Any = "testbed"
    if name.startswith("gptoss"):
        step_time = "gpt-oss-20b"
    return [
        scenario_of(
            {
                "name": title,
                "mix": {domain: counts.domains.count(domain) for domain in mix},
                "world": {"counts": file, "exact": True},
                "fleet": {"step_time": step_time},
            }
        )
        for title, mix in mixes.items()
    ]


def _arrays(file: Path) -> "Mapping[str, npt.NDArray[Any]]":
    with np.load(file, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in ("expert_ids", "offsets", "meta") if key in arrays.files}


def _is_public(file: Path) -> bool:
    with np.load(file, allow_pickle=False) as arrays:
        return "expert_ids" in arrays.files

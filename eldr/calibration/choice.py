"""Which transform and which layers predict decode best, judged on requests that did not choose them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.calibration.fit_record import TransformQuality
from eldr.signature.quality import (
    Float64Array,
    RequestPairs,
    pair_products,
    request_pairs,
    rho_gain_interval,
    select_layers,
    spearman,
)
from eldr.signature.transform import COUNTS, GATE_TRANSFORMS, TRANSFORMS, Transform

SELECTION_REACH = 0.04
"""Layers are selected only for transforms whose held-out rho is within this of the best one.

The largest gain of a selection published for ELDR is 0.032, so the others cannot come first.
"""

CountArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """The transform, the positions of the layers that count, every transform's figures, and why, in words.

    `gain` is the 95 % interval of the winner's rho above the second's, None where there was one transform only.
    """

    transform: str
    layers: tuple[int, ...]
    qualities: tuple[TransformQuality, ...]
    sentence: str
    gain: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Some requests of the calibration, pairs of them, and the decode distances of the pairs."""

    arrays: Mapping[str, CountArray]
    pairs: RequestPairs
    decode_distances: Float64Array


def choose(
    prefill: CountArray,
    decode: CountArray,
    transforms: Sequence[str],
    *,
    gates: Mapping[str, CountArray] | None = None,
    select: bool,
    held_out: float,
    max_pairs: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Choice:
    """Best of `transforms` by rho on held-out requests, counts [requests, layers, experts].

    A seeded share `held_out` of the requests judges; the others teach the weights and, where `select`, the
    layers. A mask is taken only where it beats all layers on the held-out requests. Equal figures go to the
    earlier transform. `gates` are arrays like `prefill` by the name that a gate transform reads: those transforms are
    judged over all layers and reported, and never chosen. `progress` hears how many of how many steps are done.

    The judges choose and then report, so that the winner's figure is a little too good; the interval of its gain
    says how much of it may be chance.
    """
    requests, layers = prefill.shape[:2]
    arrays = {COUNTS: prefill, **(gates or {})}
    compared = [name for name, transform in GATE_TRANSFORMS.items() if transform.reads in arrays]
    order = np.random.default_rng(seed).permutation(requests)
    cut = round(requests * held_out)

    def sample(rows: npt.NDArray[np.int64]) -> _Sample:
        pairs = request_pairs(len(rows), max_pairs, seed)
        distances = pair_products(decode[rows], pairs).distances(range(layers))
        return _Sample({name: array[rows] for name, array in arrays.items()}, pairs, distances)

    everyone = sample(np.arange(requests))
    judges, teachers = sample(np.sort(order[:cut])), sample(np.sort(order[cut:]))
    steps = (2 if select else 1) * len(transforms) + len(compared)
    qualities = []
    for step, name in enumerate([*transforms, *compared], start=1):
        qualities.append(
            TransformQuality(
                transform=name,
                rho=_rho(name, everyone, everyone, range(layers)),
                held_out_rho=(rho := _rho(name, teachers, judges, range(layers))),
                held_out_mask_rho=rho,
                mask=tuple(range(layers)),
            )
        )
        progress(step, steps)
    if select:
        reach = max(quality.held_out_rho for quality in qualities[: len(transforms)]) - SELECTION_REACH
        for index, quality in enumerate(qualities[: len(transforms)]):
            if quality.held_out_rho >= reach:
                qualities[index] = _with_mask(quality, teachers, judges)
            progress(len(transforms) + len(compared) + index + 1, steps)
    candidates = qualities[: len(transforms)]
    best = max(candidates, key=lambda quality: quality.best_held_out_rho)
    masked = best.held_out_mask_rho > best.held_out_rho
    chosen = best.mask if masked else tuple(range(layers))
    gain: tuple[float, float] | None = None
    others = [quality for quality in candidates if quality is not best]
    if others:
        second = max(others, key=lambda quality: quality.best_held_out_rho)
        mine, other = (
            _distances(quality.transform, teachers, judges, quality.best_layers(layers))
            for quality in (best, second)
        )
        gain = rho_gain_interval(judges.pairs, mine, other, judges.decode_distances, seed)
    return Choice(
        best.transform, chosen, tuple(qualities), _sentence(best, chosen, layers, others, gain), gain
    )


def _named(name: str) -> Transform:
    return GATE_TRANSFORMS[name] if name in GATE_TRANSFORMS else TRANSFORMS[name]


def _distances(name: str, teachers: _Sample, judges: _Sample, layers: Sequence[int]) -> Float64Array:
    transform = _named(name)
    weighted = transform.weigh(
        judges.arrays[transform.reads], transform.learn(teachers.arrays[transform.reads])
    )
    return pair_products(weighted, judges.pairs).distances(layers)


def _rho(name: str, teachers: _Sample, judges: _Sample, layers: Sequence[int]) -> float:
    return spearman(_distances(name, teachers, judges, layers), judges.decode_distances)


def _with_mask(quality: TransformQuality, teachers: _Sample, judges: _Sample) -> TransformQuality:
    transform = _named(quality.transform)
    counts = teachers.arrays[transform.reads]
    weighted = transform.weigh(counts, transform.learn(counts))
    found = select_layers(pair_products(weighted, teachers.pairs), teachers.decode_distances)
    return replace(
        quality,
        held_out_mask_rho=_rho(quality.transform, teachers, judges, found.layers),
        mask=found.layers,
        order=found.order,
        curve=found.curve,
    )


def _sentence(
    best: TransformQuality,
    chosen: tuple[int, ...],
    layers: int,
    others: Sequence[TransformQuality],
    interval: tuple[float, float] | None,
) -> str:
    words = [
        f"{best.transform} on {len(chosen)} of {layers} layers: rho {best.best_held_out_rho:.4f} on held-out requests"
    ]
    if others and interval is not None:
        second = max(others, key=lambda quality: quality.best_held_out_rho)
        gain = best.best_held_out_rho - second.best_held_out_rho
        low, high = interval
        chance = ", within chance" if low <= 0 else ""
        words.append(f"{gain:.4f} above {second.transform} (95 % interval {low:+.4f} to {high:+.4f}{chance})")
    if best.order:
        gain = best.held_out_mask_rho - best.held_out_rho
        verdict = "kept" if len(chosen) < layers else "not kept"
        words.append(
            f"selecting {len(best.mask)} layers changes rho by {gain:+.4f} against all layers ({verdict})"
        )
    return ", ".join(words)

"""Which transform and which layers predict decode best, judged on requests that did not choose them."""

from collections.abc import Callable, Sequence
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
    select_layers,
    spearman,
)
from eldr.signature.transform import transform_named

SELECTION_REACH = 0.04
"""Layers are selected only for transforms whose held-out rho is within this of the best one.

The largest gain of a selection published for ELDR is 0.032, so the others cannot come first.
"""

CountArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """The transform, the positions of the layers that count, every transform's figures, and why, in words."""

    transform: str
    layers: tuple[int, ...]
    qualities: tuple[TransformQuality, ...]
    sentence: str


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Some requests of the calibration, pairs of them, and the decode distances of the pairs."""

    prefill: CountArray
    pairs: RequestPairs
    decode_distances: Float64Array


def choose(
    prefill: CountArray,
    decode: CountArray,
    transforms: Sequence[str],
    *,
    select: bool,
    held_out: float,
    max_pairs: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Choice:
    """Best of `transforms` by rho on held-out requests, counts [requests, layers, experts].

    A seeded share `held_out` of the requests judges; the others teach the weights and, where `select`, the
    layers. A mask is taken only where it beats all layers on the held-out requests. Equal figures go to the
    earlier transform. `progress` hears how many of how many steps are done.
    """
    requests, layers = prefill.shape[:2]
    order = np.random.default_rng(seed).permutation(requests)
    cut = round(requests * held_out)

    def sample(rows: npt.NDArray[np.int64]) -> _Sample:
        pairs = request_pairs(len(rows), max_pairs, seed)
        distances = pair_products(decode[rows], pairs).distances(range(layers))
        return _Sample(prefill[rows], pairs, distances)

    everyone = sample(np.arange(requests))
    judges, teachers = sample(np.sort(order[:cut])), sample(np.sort(order[cut:]))
    steps = 2 * len(transforms) if select else len(transforms)
    qualities = []
    for step, name in enumerate(transforms, start=1):
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
        reach = max(quality.held_out_rho for quality in qualities) - SELECTION_REACH
        for index, quality in enumerate(qualities):
            if quality.held_out_rho >= reach:
                qualities[index] = _with_mask(quality, teachers, judges)
            progress(len(transforms) + index + 1, steps)
    best = max(qualities, key=lambda quality: quality.best_held_out_rho)
    masked = best.held_out_mask_rho > best.held_out_rho
    chosen = best.mask if masked else tuple(range(layers))
    return Choice(best.transform, chosen, tuple(qualities), _sentence(best, chosen, layers, qualities))


def _rho(name: str, teachers: _Sample, judges: _Sample, layers: Sequence[int]) -> float:
    transform = transform_named(name)
    weighted = transform.weigh(judges.prefill, transform.learn(teachers.prefill))
    return spearman(pair_products(weighted, judges.pairs).distances(layers), judges.decode_distances)


def _with_mask(quality: TransformQuality, teachers: _Sample, judges: _Sample) -> TransformQuality:
    transform = transform_named(quality.transform)
    weighted = transform.weigh(teachers.prefill, transform.learn(teachers.prefill))
    found = select_layers(pair_products(weighted, teachers.pairs), teachers.decode_distances)
    return replace(
        quality,
        held_out_mask_rho=_rho(quality.transform, teachers, judges, found.layers),
        mask=found.layers,
        order=found.order,
        curve=found.curve,
    )


def _sentence(
    best: TransformQuality, chosen: tuple[int, ...], layers: int, qualities: Sequence[TransformQuality]
) -> str:
    words = [
        f"{best.transform} on {len(chosen)} of {layers} layers: rho {best.best_held_out_rho:.4f} on held-out requests"
    ]
    others = [quality for quality in qualities if quality is not best]
    if others:
        second = max(others, key=lambda quality: quality.best_held_out_rho)
        gain = best.best_held_out_rho - second.best_held_out_rho
        words.append(f"{gain:.4f} above {second.transform}")
    if best.order:
        gain = best.held_out_mask_rho - best.held_out_rho
        verdict = "kept" if len(chosen) < layers else "not kept"
        words.append(
            f"selecting {len(best.mask)} layers changes rho by {gain:+.4f} against all layers ({verdict})"
        )
    return ", ".join(words)

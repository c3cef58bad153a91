"""Local search for the map with the least expected maximum over ranks, for all layers at once.

Objective: F = mean over sampled steps of the largest number of activated experts on a rank, under `fewest-activated`.
A maximum is flat nearly everywhere, so the search goes by a smooth stand-in, the mean over steps of the sum over ranks
of exp(sharpness * (activated - even share of the step)). Moves exchange two slots on different ranks. What an exchange
of p on rank r and q on rank s changes is estimated for all pairs at once: in steps that use p alone, r loses a unit
and s gains one, and the other way round for q. A unit that leaves or comes may be made up for by a replica choosing
anew, one hop away: so a gain costs the cheapest of the rank itself and of the ranks to which an expert chosen there
could go instead, and a loss pays the dearest of the rank itself and of those whose experts could come over. Without
replicas the estimate is exact, and exchanges on disjoint pairs of ranks add up. The best exchanges are made together
and kept where the potential really falls; where not, fewer are tried, and then the next best.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.placement.geometry import Geometry, Map
from eldr.placement.replay import Choosers, Use, use_fewest_activated

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_NEVER = np.float32(1e9)


@dataclass(frozen=True, slots=True)
class Search:
    """Effort of the search.

    sharpness: how much the fullest ranks dominate.
    rounds: trials of exchanges, at most. failures: in a row, after which a layer is done.
    judged_every: rounds between two looks at the steps that judge.
    work: steps * layers * slots^2 that one round may cost; bounds how many steps are looked at.
    steps: at most that many steps in any case, of which a third judge. exact_maps: maps that are tried one by one.
    """

    sharpness: float = 1.0
    rounds: int = 24
    failures: int = 8
    judged_every: int = 6
    work: float = 1.1e8
    steps: int = 768
    exact_maps: int = 50_000

    def steps_for(self, layers: int, slots: int) -> int:
        """How many steps to look at, those that judge included."""
        return max(48, min(self.steps, int(1.5 * self.work / (layers * slots**2))))


def improve(
    activated: npt.NDArray[np.bool_],
    judge: npt.NDArray[np.bool_],
    start: Map,
    geometry: Geometry,
    search: Search,
) -> Map:
    """The map with the least F on `judge` among `start` and those met every few rounds, [layers, slots].

    activated, judge: bool [layers, experts, steps]. The moves go by the first; the second, other steps, keeps them
    from fitting what is chance in the first.
    """
    best = start.copy()
    layers = len(start)
    if geometry.ranks == 1:
        return best
    best_largest = use_fewest_activated(judge, best, geometry).largest
    current = start.copy()
    unjudged = np.zeros(layers, dtype=bool)
    use = use_fewest_activated(activated, current, geometry)
    cost = _cost(use, search.sharpness)
    estimates = _Estimates.of(use, current, geometry, search.sharpness)
    most = np.full(layers, geometry.ranks // 2)
    failures = np.zeros(layers, dtype=np.int64)
    alive = np.arange(layers)
    for round_ in range(1, search.rounds + 1):
        trial, changed = _exchange(estimates, current, alive, most[alive], geometry)
        alive, trial = alive[changed], trial[changed]
        if alive.size:
            use = use_fewest_activated(activated[alive], trial, geometry)
            new_cost = _cost(use, search.sharpness)
            better = new_cost < cost[alive] - 1e-7
            won, lost = alive[better], alive[~better]
            current[won], cost[won] = trial[better], new_cost[better]
            unjudged[won] = True
            failures[won] = 0
            failures[lost] += 1
            estimates.forbid_last(lost[most[lost] == 1])
            most[lost] = np.maximum(1, most[lost] // 4)
            if won.size:
                part = Use(use.used[better], use.per_rank[better])
                estimates.renew(won, _Estimates.of(part, current[won], geometry, search.sharpness))
            alive = alive[failures[alive] < search.failures]
        last = not alive.size or round_ == search.rounds
        if last or round_ % search.judged_every == 0:
            rows = np.flatnonzero(unjudged)
            if rows.size:
                largest = use_fewest_activated(judge[rows], current[rows], geometry).largest
                better = largest < best_largest[rows] - 1e-9
                best[rows[better]], best_largest[rows[better]] = current[rows[better]], largest[better]
                unjudged[:] = False
        if last:
            break
    return best


def _cost(use: Use, sharpness: float) -> npt.NDArray[np.float64]:
    per_rank = use.per_rank.astype(np.float32)
    per_rank -= per_rank.mean(axis=1, keepdims=True)
    per_rank *= np.float32(sharpness)
    return np.asarray(np.exp(per_rank).sum(axis=1).mean(axis=1, dtype=np.float64))


@dataclass(slots=True)
class _Estimates:
    """The best exchange of each pair of ranks: its estimated change of the cost and its slots within the ranks.

    tiles: [layers, rank pairs, slot pairs], of which `least` and `where` are the minima.
    last: the pair of ranks of the best exchange that was tried last.
    """

    tiles: Float32Array
    least: Float32Array
    where: IntArray
    last: IntArray

    @classmethod
    def of(cls, use: Use, maps: Map, geometry: Geometry, sharpness: float) -> "_Estimates":
        layers, ranks, room = len(maps), geometry.ranks, geometry.slots_per_rank
        change = _changes(use, maps, geometry, sharpness)
        tiles = change.reshape(layers, ranks, room, ranks, room).transpose(0, 1, 3, 2, 4)
        first, second = np.triu_indices(ranks, 1)
        tiles = tiles[:, first, second].reshape(layers, len(first), room * room)
        where = tiles.argmin(axis=2)
        least = np.take_along_axis(tiles, where[:, :, None], axis=2)[:, :, 0]
        return cls(tiles, least, where, np.zeros(layers, dtype=np.int64))

    def renew(self, layers: IntArray, other: "_Estimates") -> None:
        """Takes over what is new for some layers."""
        self.tiles[layers], self.least[layers], self.where[layers] = other.tiles, other.least, other.where

    def forbid_last(self, layers: IntArray) -> None:
        """The exchange that was tried last is no candidate until the layer's map changes."""
        pair = self.last[layers]
        self.tiles[layers, pair, self.where[layers, pair]] = _NEVER
        tile = self.tiles[layers, pair]
        self.where[layers, pair] = tile.argmin(axis=1)
        self.least[layers, pair] = tile.min(axis=1)


def _changes(use: Use, maps: Map, geometry: Geometry, sharpness: float) -> Float32Array:
    """Estimated change of the cost by exchanging two slots, [layers, slots, slots]; huge where it may not be."""
    layers, ranks, steps = use.per_rank.shape
    per_rank = use.per_rank.astype(np.float32)
    per_rank -= per_rank.mean(axis=1, keepdims=True)
    potential = np.exp(np.float32(sharpness) * per_rank) / np.float32(steps)
    gain, loss = potential, potential
    if geometry.redundant:
        gain, loss = _one_hop(potential, use, maps, geometry)
    gain = gain * np.float32(np.expm1(sharpness))
    loss = loss * np.float32(-np.expm1(-sharpness))
    used = use.used.astype(np.float32)
    on_rank = used.reshape(layers, ranks, -1, steps)
    lost = (on_rank * loss[:, :, None]).reshape(used.shape)
    gained = (on_rank * gain[:, :, None]).reshape(used.shape)
    transposed = used.transpose(0, 2, 1)
    # Of p against q: -sum used_p loss_p (1 - used_q) + sum used_p gain_q (1 - used_q)
    half = lost @ transposed
    half -= lost.sum(axis=2)[:, :, None]
    half += (used @ gain.transpose(0, 2, 1))[:, :, geometry.rank_of_slot]
    half -= (gained @ transposed).transpose(0, 2, 1)
    change: Float32Array = half + half.transpose(0, 2, 1)
    if geometry.redundant:
        held = geometry.holds(maps)
        clash = held.transpose(0, 2, 1)[np.arange(layers)[:, None], maps][:, :, geometry.rank_of_slot]
        change[clash | clash.transpose(0, 2, 1)] = _NEVER
    return change


def _one_hop(
    potential: Float32Array, use: Use, maps: Map, geometry: Geometry
) -> tuple[Float32Array, Float32Array]:
    """Potential at which a rank gains and loses a unit, if one expert in use may choose anew,
    [layers, ranks, steps]."""
    layers, _, steps = potential.shape
    table = Choosers.of(maps, geometry)
    every = np.arange(layers)
    # One rank more, for replicas that a padded row lacks: it never is the cheaper one, and never the dearer.
    spare = np.zeros((layers, 1, steps), dtype=np.float32)
    gain, loss = (np.concatenate([potential, spare], axis=1) for _ in range(2))
    away, over = (np.concatenate([potential, spare + fill], axis=1) for fill in (_NEVER, np.float32(0)))
    for expert in range(table.ranks.shape[1]):
        rank, slot = table.ranks[:, expert], table.slots[:, expert]
        for own in range(rank.shape[1]):
            here = rank[:, own]
            used = use.used[every, slot[:, own]] & (slot[:, own] >= 0)[:, None]
            for other in range(rank.shape[1]):
                if other != own:
                    there = rank[:, other]
                    cheaper = np.where(used, away[every, there], _NEVER)
                    gain[every, here] = np.minimum(gain[every, here], cheaper)
                    dearer = np.where(used, over[every, here], np.float32(0))
                    loss[every, there] = np.maximum(loss[every, there], dearer)
    return gain[:, :-1], loss[:, :-1]


def _exchange(
    estimates: _Estimates, current: Map, alive: IntArray, most: IntArray, geometry: Geometry
) -> tuple[Map, npt.NDArray[np.bool_]]:
    """Maps after the best exchanges, at most `most` [alive] and on disjoint pairs of ranks; and which changed."""
    room = geometry.slots_per_rank
    first, second = np.triu_indices(geometry.ranks, 1)
    least = estimates.least[alive]
    trial = current[alive]
    every = np.arange(len(alive))
    changed = np.zeros(len(alive), dtype=bool)
    for turn in range(geometry.ranks // 2):
        pair = least.argmin(axis=1)
        good = (least[every, pair] < -1e-6) & (turn < most)
        if not good.any():
            break
        rows, chosen = every[good], pair[good]
        if turn == 0:
            estimates.last[alive[rows]] = chosen
        inside = estimates.where[alive[rows], chosen]
        p, q = first[chosen] * room + inside // room, second[chosen] * room + inside % room
        trial[rows, p], trial[rows, q] = trial[rows, q], trial[rows, p]
        changed[rows] = True
        for taken in (first[chosen], second[chosen]):
            hits = (first[None] == taken[:, None]) | (second[None] == taken[:, None])
            least[rows] = np.where(hits, _NEVER, least[rows])
    # Exchanges that are fine one by one may bring replicas of one expert together.
    twice = geometry.holds(trial).sum(axis=(1, 2)) < geometry.slots
    trial[twice] = current[alive][twice]
    return trial, changed

"""How good a placement could be: an offline local search over the requests in flight, with their true decode shares.

The objective is the mean step time per request, sum over decoders of n * T(n, U) / sum of n, which is the mean time
per output token of that moment. No router can reach it: the search moves requests that have already begun, and it
sees what they will decode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eldr.simulator.step_time import StepTime

Floats = npt.NDArray[np.float64]
Floats32 = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]

_LEAST_LEFT = 1e-5
"""A share counts as at most 1 - this, so that taking a request out of a batch can be computed."""

_LEAST_GAIN = 1e-7
"""Of the objective: a smaller gain is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """The requests in flight at one time.

    `shares` float32 [requests, layers, experts] are the probabilities that a decode step touches an expert, `on`
    [requests] the decoder of each, `step_times` one per decoder, `max_batch` the most requests of a decoder.
    """

    shares: Floats32
    on: Places
    step_times: tuple[StepTime, ...]
    max_batch: int = 512


@dataclass(frozen=True, slots=True)
class Clairvoyance:
    """Mean step time per request in ms, means over moments.

    balanced: requests dealt out at random, equally many each, as the load balancers do. placed: as the policy did.
    best: the best that the search found for the same requests.
    """

    balanced_ms: float
    placed_ms: float
    best_ms: float

    @property
    def possible(self) -> float:
        """Reduction against `balanced_ms` that the search reaches, a share."""
        return 1.0 - self.best_ms / self.balanced_ms

    @property
    def reached(self) -> float:
        """Share of the possible reduction that the policy has; NaN where there is none."""
        gain = self.balanced_ms - self.best_ms
        return (self.balanced_ms - self.placed_ms) / gain if gain > 0 else float("nan")


def mean_step_ms(moment: Moment, on: Places) -> float:
    """The objective for the placement `on` [requests], in milliseconds."""
    return _Search(moment, on).objective_ms()


def dealt(moment: Moment, rng: np.random.Generator) -> Places:
    """A random placement with equal counts, within one."""
    order = rng.permutation(len(moment.on))
    on = np.empty(len(order), np.intp)
    on[order] = np.arange(len(order)) % len(moment.step_times)
    return on


def searched(moment: Moment, on: Places) -> Places:
    """A placement that no move of one request and no swap of two makes better, found from `on`."""
    search = _Search(moment, on)
    # Swaps are costly to list, so moves go first; each may open the other.
    while search.move() | search.swap():
        pass
    return search.on


def clairvoyance(moments: Sequence[Moment], seed: int = 0, deals: int = 4) -> Clairvoyance:
    """Compares the placements of `moments` with random deals and with the best of two searches each.

    One search begins at the placement itself, so that `best_ms` is never above `placed_ms`, the other at a deal.
    Raises ValueError where there are no moments.
    """
    if not moments:
        raise ValueError("a bound needs at least one moment")
    rng = np.random.default_rng([seed, 11])
    rows = []
    for moment in moments:
        random = [dealt(moment, rng) for _ in range(deals)]
        best = min(mean_step_ms(moment, searched(moment, start)) for start in (moment.on, random[0]))
        balanced = float(np.mean([mean_step_ms(moment, on) for on in random]))
        rows.append((balanced, mean_step_ms(moment, moment.on), best))
    return Clairvoyance(*np.mean(rows, axis=0).tolist())


@dataclass(slots=True, eq=False)
class _Search:
    """A placement and, per decoder, the experts that its batch leaves untouched.

    `kept` float32 [requests, layers * experts] is 1 - share, `log_kept` its logarithm; `left` [decoders, layers *
    experts] the probability that a step touches an expert of none of the batch.
    """

    moment: Moment
    on: Places
    kept: Floats32 = field(init=False)
    log_kept: Floats32 = field(init=False)
    left: Floats32 = field(init=False)
    counts: npt.NDArray[np.int64] = field(init=False)
    fixed_ms: Floats = field(init=False)
    per_expert_ms: Floats = field(init=False)

    def __post_init__(self) -> None:
        moment = self.moment
        requests, layers, experts = moment.shares.shape
        self.on = self.on.copy()
        self.kept = np.maximum(1.0 - moment.shares.reshape(requests, -1), _LEAST_LEFT).astype(np.float32)
        self.log_kept = np.log(self.kept)
        self.counts = np.bincount(self.on, minlength=len(moment.step_times))
        # n * T(n, U) = fixed_ms[n] - per_expert_ms[n] * (untouched experts, summed over layers).
        batches = range(requests + 1)
        none = [[1e3 * n * step.seconds(n, 0.0) for n in batches] for step in moment.step_times]
        every = [[1e3 * n * step.seconds(n, float(experts)) for n in batches] for step in moment.step_times]
        self.fixed_ms = np.array(every)
        self.per_expert_ms = (self.fixed_ms - np.array(none)) / (experts * layers)
        self.left = np.ones((len(moment.step_times), self.kept.shape[1]), np.float32)
        for decoder in range(len(self.left)):
            self._renew(decoder)

    def objective_ms(self) -> float:
        decoders = np.arange(len(self.counts))
        total = self._cost_ms(decoders, self.counts, self.left.sum(axis=1, dtype=np.float64)).sum()
        return float(total) / max(1, len(self.on))

    def move(self) -> bool:
        """Moves single requests while one gains; True where any was moved."""
        moved, idle, request = False, 0, 0
        decoders = np.arange(len(self.counts))
        untouched = self.left.sum(axis=1, dtype=np.float64)
        now_ms = self._cost_ms(decoders, self.counts, untouched)
        count = len(self.on)
        while idle < count:
            source = int(self.on[request])
            with_it = (self.left @ self.kept[request]).astype(np.float64)
            more = np.minimum(self.counts + 1, count)
            added = self._cost_ms(decoders, more, with_it) - now_ms
            added[self.counts >= self.moment.max_batch] = np.inf
            added[source] = 0.0
            less = self.counts[source] - 1
            without = float((self.left[source] / self.kept[request]).sum(dtype=np.float64)) if less else 0.0
            rest_ms = float(self._cost_ms(source, less, without)) if less else 0.0
            added += rest_ms - now_ms[source]
            added[source] = 0.0
            target = int(added.argmin())
            if added[target] < -_LEAST_GAIN * now_ms.sum():
                self.on[request] = target
                for decoder in (source, target):
                    self._renew(decoder)
                    untouched[decoder] = self.left[decoder].sum(dtype=np.float64)
                    now_ms[decoder] = self._cost_ms(decoder, self.counts[decoder], untouched[decoder])
                moved, idle = True, 0
            else:
                idle += 1
            request = (request + 1) % count
        return moved

    def swap(self) -> bool:
        """Exchanges two requests of different decoders while that gains; True where any were exchanged."""
        swapped = False
        while pairs := self._swaps():
            for one, other in pairs:
                self.on[one], self.on[other] = self.on[other], self.on[one]
                self._renew(int(self.on[one]))
                self._renew(int(self.on[other]))
            swapped = True
        return swapped

    def _swaps(self) -> list[tuple[int, int]]:
        """The best exchanges of disjoint pairs of decoders, whose gains therefore add up."""
        untouched = self.left.sum(axis=1, dtype=np.float64)
        decoders = np.arange(len(self.counts))
        weight = self.per_expert_ms[decoders, self.counts]
        # [i, j]: what i's decoder leaves untouched with j in i's place, against now, in ms.
        gain = (self.left[self.on] / self.kept) @ self.kept.T
        gain -= untouched[self.on, None].astype(np.float32)
        gain *= weight[self.on, None].astype(np.float32)
        gain += gain.T.copy()
        gain[self.on[:, None] == self.on] = -np.inf
        total_ms = float(self._cost_ms(decoders, self.counts, untouched).sum())
        # Float32 sums err by more than the least gain that counts in the moves.
        least = max(_LEAST_GAIN, 1e-6) * total_ms
        pairs: list[tuple[int, int]] = []
        while True:
            one, other = divmod(int(gain.argmax()), len(self.on))
            if not gain[one, other] > least:
                return pairs
            pairs.append((one, other))
            busy = (self.on == self.on[one]) | (self.on == self.on[other])
            gain[busy] = -np.inf
            gain[:, busy] = -np.inf

    def _renew(self, decoder: int) -> None:
        there = self.on == decoder
        self.counts[decoder] = np.count_nonzero(there)
        self.left[decoder] = np.exp(self.log_kept[there].sum(axis=0))

    def _cost_ms(
        self, decoder: "Places | int", batch: "npt.NDArray[np.int64] | int", untouched: "Floats | float"
    ) -> "npt.NDArray[np.float64]":
        found: Floats = self.fixed_ms[decoder, batch] - self.per_expert_ms[decoder, batch] * untouched
        return found

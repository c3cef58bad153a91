"""The requests of a simulation: a synthetic world with stated locality, or recorded counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.calibration.counts import Counts
from eldr.signature.expert_signature import ExpertSignature

Floats = npt.NDArray[np.float32]

FINGERPRINT = "simulated"
_AT_A_TIME = 256
_ROWS_AT_A_TIME = 768
"""So few that the arrays of one block stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What one request is made of.

    `signature` is what a prefill worker would hand over; `shares` float32 [layers, experts] the probability that
    one of its decode steps touches an expert, which no router sees. `routes` uint8 [steps, layers, top_k] are its
    decode picks where single steps are known.
    """

    domain: str
    signature: ExpertSignature
    shares: Floats
    routes: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class WorldShape:
    """The synthetic world's constants. Raises ValueError naming a field out of range.

    A request's logits are a shared part, one of its domain, one of its subdomain and one of its own, each normal with
    these standard deviations; those of its prefill have a further one. A token takes `top_k` experts. A signature
    holds the picks of `signed_share` of the prompt's tokens: below 1 where prefixes come from a cache that keeps none.
    """

    layers: int = 12
    experts: int = 128
    top_k: int = 8
    subdomains: int = 6
    shared: float = 1.0
    domain: float = 1.3
    subdomain: float = 0.8
    request: float = 0.6
    prefill: float = 0.6
    prompt_median: float = 200.0
    prompt_sigma: float = 0.6
    signed_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "subdomains"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.top_k >= self.experts:
            raise ValueError(f"top_k must be below experts ({self.experts}), got {self.top_k}")
        for name in ("shared", "domain", "subdomain", "request", "prefill", "prompt_sigma"):
            if not 0 <= getattr(self, name) < 100:
                raise ValueError(f"{name} must be 0 to 100, got {getattr(self, name)}")
        if not 0 < self.signed_share <= 1:
            raise ValueError(f"signed_share must be above 0 and at most 1, got {self.signed_share}")
        if not self.prompt_median >= 1:
            raise ValueError(f"prompt_median must be at least 1, got {self.prompt_median}")


class SyntheticWorld:
    """Domains that like different experts. The world is fixed by `seed`; requests are drawn with a generator."""

    def __init__(self, shape: WorldShape, domains: Sequence[str], seed: int = 0) -> None:
        self.shape = shape
        self.domains = tuple(domains)
        size = (shape.layers, shape.experts)
        rng = np.random.default_rng(seed)
        shared = rng.normal(0, shape.shared, size)
        # One stream per domain, so that a domain is the same whatever others there are.
        self._logits: dict[str, Floats] = {}
        for index, name in enumerate(self.domains):
            own = np.random.default_rng([seed, 1 + index])
            domain = shared + own.normal(0, shape.domain, size)
            parts = own.normal(0, shape.subdomain, (shape.subdomains, *size))
            self._logits[name] = (domain + parts).astype(np.float32)

    def draw(self, domains: Sequence[str], rng: np.random.Generator) -> list[Prompt]:
        """A prompt of each of `domains`, in order."""
        prompts: list[Prompt] = []
        for start in range(0, len(domains), _AT_A_TIME):
            prompts += self._some(domains[start : start + _AT_A_TIME], rng)
        return prompts

    def _some(self, domains: Sequence[str], rng: np.random.Generator) -> list[Prompt]:
        shape = self.shape
        size = (len(domains), shape.layers, shape.experts)
        part = rng.integers(shape.subdomains, size=len(domains))
        logits = np.stack([self._logits[name][p] for name, p in zip(domains, part, strict=True)])
        logits += shape.request * rng.standard_normal(size, np.float32)
        prefill = logits + shape.prefill * rng.standard_normal(size, np.float32)
        tokens = np.maximum(
            1, np.rint(rng.lognormal(np.log(shape.prompt_median), shape.prompt_sigma, len(domains)))
        )
        tokens = tokens.astype(np.int64)
        decode = inclusion(logits, shape.top_k)
        signed = np.maximum(1, np.rint(tokens * shape.signed_share)).astype(np.int64)
        counts = drawn_counts(inclusion(prefill, shape.top_k), signed, shape.top_k, rng)
        return [
            Prompt(
                name,
                ExpertSignature(FINGERPRINT, shape.top_k, int(tokens[i]), int(signed[i]), counts[i]),
                decode[i],
            )
            for i, name in enumerate(domains)
        ]


class RecordedWorld:
    """Requests of a counts file, drawn with replacement within their domain.

    Every second request of a domain is kept for calibration, and no traffic is drawn from those: `calibration` is the
    world of them. Shares are decode counts over decode tokens. With `routes`, single steps are kept where the file
    has them. Raises ValueError for a domain with a single request.
    """

    def __init__(self, counts: Counts, routes: bool, _for_calibration: bool = False) -> None:
        decoded = counts.decode_tokens
        self.shape = (counts.layers, counts.experts)
        self._counts = counts
        self._tokens = decoded
        self._routes = routes and counts.decode_ids is not None
        known: dict[str, list[int]] = {}
        for row in range(counts.requests):
            if decoded[row] > 0:
                known.setdefault(counts.domains[row] or "(none)", []).append(row)
        for name, rows in known.items():
            if len(rows) < 2:
                raise ValueError(f"domain {name} has one request; traffic and calibration need one each")
        self._rows = {name: rows[int(_for_calibration) :: 2] for name, rows in known.items()}
        self.domains = tuple(sorted(self._rows))
        self._made: dict[int, Prompt] = {}

    @property
    def calibration(self) -> "RecordedWorld":
        """The requests that are kept for calibration, without their routes."""
        return RecordedWorld(self._counts, False, _for_calibration=True)

    def draw(self, domains: Sequence[str], rng: np.random.Generator) -> list[Prompt]:
        """A recorded request of each of `domains`, in order."""
        return [
            self.prompt(self._rows[name][int(rng.integers(len(self._rows[name])))], name) for name in domains
        ]

    def prompt(self, row: int, domain: str) -> Prompt:
        """The prompt of one row."""
        if row not in self._made:
            counts = self._counts
            tokens = int(counts.prompt_len[row])
            signature = ExpertSignature(FINGERPRINT, counts.top_k, tokens, tokens, counts.prefill_counts[row])
            shares = (counts.decode_counts[row] / self._tokens[row]).astype(np.float32)
            routes = None
            if self._routes and counts.decode_ids is not None and counts.decode_len is not None:
                routes = np.asarray(counts.decode_ids[row, : counts.decode_len[row]], np.uint8)
            self._made[row] = Prompt(domain, signature, np.minimum(shares, 1.0), routes)
        return self._made[row]


World = SyntheticWorld | RecordedWorld


def inclusion(logits: Floats, top_k: int) -> Floats:
    """Probability that a token selects each expert, float32 [..., experts], summing to `top_k`.

    Of `top_k` draws in succession with probabilities softmax(logits): 1 - exp(-r p), r such that they sum to top_k.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    out = np.empty_like(rows)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        block = slice(start, start + _ROWS_AT_A_TIME)
        _inclusion(rows[block], top_k, out[block])
    return out.reshape(logits.shape)


def _inclusion(logits: Floats, top_k: int, out: Floats) -> None:
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    rate = np.full((len(p), 1), float(top_k), np.float32)
    left = np.empty_like(p)
    for _ in range(6):
        np.exp(np.multiply(-rate, p, out=left), out=left)
        missing = top_k - (p.shape[-1] - left.sum(axis=-1, keepdims=True))
        left *= p
        rate += missing / np.maximum(left.sum(axis=-1, keepdims=True), 1e-12)
    np.exp(np.multiply(-rate, p, out=left), out=left)
    np.subtract(1.0, left, out=out)
    out *= top_k / out.sum(axis=-1, keepdims=True)
    np.minimum(out, np.float32(1.0), out=out)


def drawn_counts(
    chosen: Floats, tokens: npt.NDArray[np.int64], top_k: int, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """Counts of `tokens` [requests] tokens, int32 [requests, layers, experts]; every layer sums to tokens * top_k.

    Binomial counts by their normal approximation, then made to sum up at the likeliest experts, one by one.
    """
    layers, experts = chosen.shape[1:]
    noise = rng.standard_normal(chosen.shape, np.float32).reshape(-1, experts)
    rows = chosen.reshape(-1, experts)
    many = np.repeat(tokens, layers)[:, None]
    counts = np.empty(rows.shape, np.int32)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        block = slice(start, start + _ROWS_AT_A_TIME)
        share, most = rows[block], many[block].astype(np.float32)
        mean = most * share
        drawn = np.sqrt(mean * (1 - share))
        drawn *= noise[block]
        drawn += mean
        np.clip(np.rint(drawn, out=drawn), 0, most, out=drawn)
        counts[block] = drawn
        _make_up(counts[block], share, many[block], top_k)
    return counts.reshape(chosen.shape)


def _make_up(
    counts: npt.NDArray[np.int32], chosen: Floats, tokens: npt.NDArray[np.int64], top_k: int
) -> None:
    """Adds or takes one at the likeliest experts until every row of `counts` sums to `tokens` [rows, 1] * top_k."""
    while True:
        missing = (tokens * top_k)[:, 0] - counts.sum(axis=-1)
        wrong = np.flatnonzero(missing)
        if not wrong.size:
            return
        missing, some = missing[wrong], counts[wrong]
        room = np.where(missing[:, None] > 0, some < tokens[wrong], some > 0)
        turns = np.minimum(np.abs(missing), np.count_nonzero(room, axis=-1))
        unlikely = np.where(room, -chosen[wrong], np.float32(1.0))
        least = np.take_along_axis(np.sort(unlikely, axis=-1), turns[:, None] - 1, -1)
        turn = room & (unlikely <= least)
        for row in np.flatnonzero(np.count_nonzero(turn, axis=-1) != turns):
            # Equal shares: those that sort first.
            order = np.argsort(-chosen[wrong[row]])
            first = order[np.flatnonzero(room[row][order])[: turns[row]]]
            turn[row] = False
            turn[row, first] = True
        counts[wrong] = some + np.where(turn, np.sign(missing)[:, None], 0).astype(np.int32)

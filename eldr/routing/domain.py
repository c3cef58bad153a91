"""Policy `domain`: a pool of decoders for every label that clients give (the oracle of the published runs)."""

from collections.abc import Mapping

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView
from eldr.routing.draw import draw
from eldr.routing.eligibility import eligible_decoders, fewest, loads
from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.options import Option, resolve


class Domain:
    """Fewest requests in flight within the pool of the request's label.

    Decoders, by worker id, are shared out among the labels seen, by name: one each, the others in proportion
    to the labels' recent shares by largest remainder. With more labels than decoders, or without a label, the
    shortest queue of all decides: the fallbacks `more-domains-than-decoders` and `no-domain`. A label's share
    is its exponential mean over `window` requests; pools are made anew with each new label and every
    `renew_every` requests, since a decoder that changes pools keeps what it runs.
    """

    name = "domain"
    OPTIONS: Mapping[str, Option] = {
        "window": Option(1000.0, 1.0, 1e6, "Requests over which the mix of labels is measured."),
        "renew_every": Option(1000.0, 1.0, 1e6, "Requests between two divisions of the decoders."),
        "equal": Option(0.0, 0.0, 1.0, "1: pools of equal size, whatever the mix."),
    }
    MAX_DOMAINS = 1000
    """Labels beyond that are no labels: clients choose them."""

    def __init__(self, options: Mapping[str, float] | None = None, seed: int = 0) -> None:
        self.options: Mapping[str, float] = resolve(self.name, self.OPTIONS, options or {})
        self._seed = seed
        self._by_load = JoinShortestQueue(seed)
        self._shares: Mapping[str, float] = {}
        self._divided: Mapping[str, float] = {}
        self._since = 0

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        eligible, left_out = eligible_decoders(request, fleet)
        if not request.domain:
            return self._load_only(request, fleet, "no-domain")
        self._count(request.domain)
        if request.domain not in self._divided or len(self._divided) > len(eligible):
            return self._load_only(request, fleet, "more-domains-than-decoders")
        sizes = pool_sizes(self._divided, len(eligible), equal=bool(self.options["equal"]))
        first = sum(size for label, size in sizes.items() if label < request.domain)
        pool = range(first, first + sizes[request.domain])
        load = loads(eligible)
        among = load < 0
        among[pool.start : pool.stop] = True
        tied = fewest(eligible, load, among)
        picked = eligible[draw(self._seed, request.request_id, tied)]
        candidates = [
            Candidate(
                view.worker_id, i in pool, float(load[i]), "" if i in pool else "other pool", view.in_flight
            )
            for i, view in enumerate(eligible)
        ]
        reason = f"fewest in flight ({picked.in_flight}) of {len(pool)} for domain {request.domain!r}"
        return Decision(picked.worker_id, self.name, reason, (*candidates, *left_out))

    def _count(self, domain: str) -> None:
        # New mappings instead of changed ones: a shallow copy of the policy must not see them.
        known = domain in self._shares
        if not known and len(self._shares) >= self.MAX_DOMAINS:
            return
        keep = 1.0 - 1.0 / self.options["window"]
        shares = {label: keep * share for label, share in self._shares.items()}
        shares[domain] = shares.get(domain, 0.0) + 1.0
        self._shares = shares
        self._since += 1
        if not known or self._since >= self.options["renew_every"]:
            self._divided, self._since = shares, 0

    def _load_only(self, request: DecodeRequest, fleet: tuple[DecoderView, ...], fallback: str) -> Decision:
        by_load = self._by_load.select(request, fleet)
        reason = f"{fallback}: {by_load.reason}"
        return Decision(by_load.worker_id, self.name, reason, by_load.candidates, fallback=fallback)


def pool_sizes(shares: Mapping[str, float], decoders: int, equal: bool = False) -> dict[str, int]:
    """Decoders per label, sorted by label: one each, the rest by largest remainder.

    `decoders` must be at least the number of labels. Example: {"a": 60, "b": 30, "c": 10}, 6 decoders: a gets 3,
    b 2, c 1.
    """
    labels = sorted(shares)
    if len(labels) > decoders:
        raise ValueError(f"decoders must be at least the {len(labels)} labels, got {decoders}")
    total = sum(shares.values())
    quota = {label: decoders * (1 / len(labels) if equal else shares[label] / total) for label in labels}
    sizes = {label: max(1, int(quota[label])) for label in labels}
    while sum(sizes.values()) < decoders:
        most = max(labels, key=lambda label: quota[label] - sizes[label])
        sizes[most] += 1
    while sum(sizes.values()) > decoders:
        least = min((x for x in labels if sizes[x] > 1), key=lambda label: quota[label] - sizes[label])
        sizes[least] -= 1
    return sizes

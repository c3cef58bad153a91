"""What the workers report back about a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass(slots=True)
class StepReport:
    """Worker to scheduler, once per step with tokens.

    layers: MoE layer indices of this report, the first axis of everything below.
    counts: request -> int32 [layers, experts], expert counts of a completed prompt.
    union: bool [layers, experts], experts that the decode step touched; None where the step was no decode step.
    picks: request -> int32 [tokens, layers, top_k], picks of tracked requests.
    misses: captures of this step that had an unforeseen shape.
    """

    layers: tuple[int, ...]
    decode_tokens: int = 0
    counts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    union: npt.NDArray[np.bool_] | None = None
    picks: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    misses: int = 0

    def joined(self, other: "StepReport") -> "StepReport":
        """The reports of two pipeline ranks as one; they own disjoint layers (case 1.18)."""
        layers = self.layers + other.layers
        order = np.argsort(layers, kind="stable")

        def join(
            axis: int, mine: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32]
        ) -> npt.NDArray[np.int32]:
            return np.take(np.concatenate([mine, theirs], axis), order, axis)

        return StepReport(
            layers=tuple(layers[i] for i in order),
            decode_tokens=self.decode_tokens,
            counts={r: join(0, c, other.counts[r]) for r, c in self.counts.items() if r in other.counts},
            union=None
            if self.union is None or other.union is None
            else np.concatenate([self.union, other.union])[order],
            picks={r: join(1, p, other.picks[r]) for r, p in self.picks.items() if r in other.picks},
            misses=self.misses + other.misses,
        )


class PendingReport:
    """A report whose arrays are still on their way from the device."""

    def __init__(self, read: Callable[[], StepReport]) -> None:
        self._read = read

    def resolve(self) -> StepReport:
        """The report; waits for the device where it must."""
        return self._read()


class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One rank's report beside whatever the inner connector reports. Either may be missing.

    `expired` are held transfers that this rank gave up in the step, because their lease ran out or was ended.

    A pending report is resolved when it is first read or pickled, and not before: under async scheduling the
    worker goes on to the next step while this one's results travel. Pickling is what happens in worker processes,
    on the thread that waits for the step's tokens anyway; reading, where worker and scheduler share a process.
    """

    def __init__(
        self,
        report: StepReport | PendingReport | None,
        inner: KVConnectorWorkerMetadata | None,
        expired: frozenset[str] = frozenset(),
    ) -> None:
        self._report = report
        self.inner = inner
        self.expired = expired

    @property
    def report(self) -> StepReport | None:
        """The report, resolved."""
        if isinstance(self._report, PendingReport):
            self._report = self._report.resolve()
        return self._report

    def __reduce__(self) -> tuple[type["WorkerMetadata"], tuple[Any, ...]]:
        return WorkerMetadata, (self.report, self.inner, self.expired)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Joins two ranks. Ranks that only repeat what another one reports send no report."""
        assert isinstance(other, WorkerMetadata)
        mine, theirs = self.report, other.report
        report = mine.joined(theirs) if mine is not None and theirs is not None else mine or theirs
        inner = self.inner
        if inner is None:
            inner = other.inner
        elif other.inner is not None:
            inner = inner.aggregate(other.inner)
        return WorkerMetadata(report, inner, self.expired | other.expired)

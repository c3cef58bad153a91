"""What the scheduler tells the workers about a step, and what they report back."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass(slots=True)
class Span:
    """Tokens of one request in a step: positions `first` to `first + tokens - 1`.

    `blocks` are the KV blocks that hold them, starting with the block of `first`.
    """

    first: int
    tokens: int
    blocks: list[int]

    def slots(self, block_size: int) -> npt.NDArray[np.int64]:
        """KV slot of each token, int64 [tokens]."""
        positions = np.arange(self.first, self.first + self.tokens, dtype=np.int64)
        blocks = np.asarray(self.blocks, dtype=np.int64)
        return blocks[positions // block_size - self.first // block_size] * block_size + positions % block_size


@dataclass(slots=True)
class StepPlan:
    """Scheduler to worker, once per step; rides on the connector's own metadata.

    tokens: tokens scheduled in the step.
    decode_tokens: how many of them are decode tokens; the step is a decode step when all are.
    finishing: request -> KV blocks of its whole prompt, for prompts that this step completes.
    forget: KV blocks whose contents were not computed here, so that their rows mean nothing.
    tracked: request -> span of generated tokens whose picks are wanted.
    spans: request -> span of all its tokens; only where the model runner gives no slot mapping (V2).
    """

    tokens: int = 0
    decode_tokens: int = 0
    finishing: dict[str, list[int]] = field(default_factory=dict)
    forget: list[int] = field(default_factory=list)
    tracked: dict[str, Span] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler, once per step with tokens.

    layers: MoE layer indices of this report, the first axis of everything below.
    counts: request -> int32 [layers, experts], expert counts of a completed prompt.
    union: bool [layers, experts] packed by np.packbits along experts, experts that the decode step touched;
        None where the step was no decode step.
    picks: request -> int32 [tokens, layers, top_k], picks of tracked requests.
    misses: captures of this step that had an unforeseen shape.
    """

    layers: tuple[int, ...]
    decode_tokens: int = 0
    counts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    union: npt.NDArray[np.uint8] | None = None
    picks: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    misses: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Joins the reports of two pipeline ranks, which own disjoint layers (case 1.18)."""
        assert isinstance(other, StepReport)
        layers = self.layers + other.layers
        order = np.argsort(layers, kind="stable")

        def join(axis: int, mine: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
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

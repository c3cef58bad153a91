"""What the scheduler tells the workers about a step."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


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
        return (
            blocks[positions // block_size - self.first // block_size] * block_size + positions % block_size
        )


@dataclass(slots=True)
class StepPlan:
    """Scheduler to worker, once per step; rides on the connector's own metadata.

    tokens: tokens scheduled in the step.
    decode_tokens: how many of them are decode tokens, drafts included; the step is a decode step when all are.
    finishing: request -> KV blocks of its whole prompt, for prompts that this step completes.
    forget: KV blocks handed out since the last plan; their rows start empty.
    limits: block -> leading slots that hold prompt tokens, for new blocks where that is not all of them; only
        where tokens are drafted.
    tracked: request -> span of generated tokens whose picks are wanted.
    spans: request -> span of all its tokens; only where the model runner gives no slot mapping (V2).
    refused: requests whose KV was pulled after its lease had ended; the workers report it as a failed load.
    awaited: whether the scheduler waits for the step's end even if nothing happens in it.
    """

    tokens: int = 0
    decode_tokens: int = 0
    finishing: dict[str, list[int]] = field(default_factory=dict)
    forget: list[int] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)
    tracked: dict[str, Span] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    awaited: bool = False

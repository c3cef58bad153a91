"""KV slots of a batch from what the scheduler knows, for model runners that keep their slot mapping to themselves."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from eldr.engine.step import Span


def batch_slots(
    order: Sequence[str], spans: Mapping[str, Span], block_size: int
) -> npt.NDArray[np.int64] | None:
    """KV slot of each token of a batch whose requests lie in `order`, int64 [tokens].

    None where the batch holds a request that has no span: the scheduler and the runner then disagree.
    """
    try:
        batch = [spans[request_id] for request_id in order]
    except KeyError:
        return None
    tokens = np.array([span.tokens for span in batch], np.int64)
    first = np.array([span.first for span in batch], np.int64)
    # Position of the batch's token i in its request is i + shift of that request; the same for its block.
    begins = np.cumsum(tokens) - tokens
    positions = np.arange(tokens.sum()) + np.repeat(first - begins, tokens)
    table = np.array([block for span in batch for block in span.blocks], np.int64)
    tables = np.array([len(span.blocks) for span in batch], np.int64)
    shift = np.cumsum(tables) - tables - first // block_size
    return table[positions // block_size + np.repeat(shift, tokens)] * block_size + positions % block_size

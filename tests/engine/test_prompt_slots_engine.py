"""Where tokens are drafted, only slots of prompt tokens count towards block rows."""

import numpy as np
import pytest
import torch

from eldr.engine.kernels.contract import StepWork
from eldr.engine.kernels.vectorised import VectorReducer
from eldr.engine.prompt_slots import PromptSlots
from eldr.engine.signature_cache import SignatureCache

pytestmark = pytest.mark.engine

BLOCKS, SIZE = 4, 4


def both(slots: PromptSlots, asked: list[int]) -> list[int]:
    """`only` of a tensor and of an array, which must agree."""
    array = slots.only(np.array(asked, np.int64)).tolist()
    assert slots.only(torch.tensor(asked)).tolist() == array
    return array


def test_slots_behind_the_prompt_lie_beyond_the_cache() -> None:
    slots = PromptSlots(BLOCKS, SIZE, torch.device("cpu"))
    slots.handed_out([0, 1, 2], {1: 3, 2: 0})
    assert both(slots, [0, 3, 4, 6, 7, 8, 11]) == [0, 3, 4, 6, 7 + 16, 8 + 16, 11 + 16]
    assert slots.beyond(np.array([7, 8])).tolist() == [7 + 16, 8 + 16]


def test_padding_stays_padding() -> None:
    slots = PromptSlots(BLOCKS, SIZE, torch.device("cpu"))
    slots.handed_out([0, 3], {0: 0, 3: 0})
    assert both(slots, [-1, 0, 15]) == [-1, 16, 31]


def test_a_block_handed_out_again_counts_whole() -> None:
    slots = PromptSlots(BLOCKS, SIZE, torch.device("cpu"))
    slots.handed_out([1], {1: 1})
    assert both(slots, [4, 5]) == [4, 21]
    slots.handed_out([1], {})
    assert both(slots, [4, 5, 6, 7]) == [4, 5, 6, 7]


def test_a_limit_that_comes_after_its_block_was_handed_out_holds() -> None:
    """The block of a request whose KV is still on its way from elsewhere."""
    slots = PromptSlots(BLOCKS, SIZE, torch.device("cpu"))
    slots.handed_out([1], {})
    slots.handed_out([], {1: 2})
    assert both(slots, [5, 6]) == [5, 22]


def test_rejected_drafts_change_no_row_and_their_picks_can_still_be_read() -> None:
    """Case 1.4: a slot is drafted, rejected, and written again by another token."""
    cache = SignatureCache(BLOCKS, 1, 8, SIZE, torch.device("cpu"))
    reducer = VectorReducer(1, 8, 1, cache)
    slots = PromptSlots(BLOCKS, SIZE, torch.device("cpu"))
    slots.handed_out([1], {1: 2})

    def step(written: list[int], experts: list[int], wanted: list[int]) -> tuple[list[int], list[int]]:
        ids = torch.tensor(experts, dtype=torch.int32).view(-1, 1, 1)
        work = StepWork(
            ids,
            slots.only(torch.tensor(written)),
            complete=[[1]],
            wanted=slots.beyond(np.array(wanted, np.int64)),
        )
        reduced = reducer.reduce(work).result()
        picks = [] if reduced.picks is None else reduced.picks.ravel().tolist()
        return reduced.counts[0].ravel().tolist(), picks

    assert step([4, 5], [0, 1], []) == ([1, 1, 0, 0, 0, 0, 0, 0], [])
    assert step([6, 7], [2, 3], [6, 7]) == ([1, 1, 0, 0, 0, 0, 0, 0], [2, 3])
    assert step([7], [4], [6, 7]) == ([1, 1, 0, 0, 0, 0, 0, 0], [-1, 4])

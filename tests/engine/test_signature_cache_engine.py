"""The block-indexed rows: what they hold over many steps, and what they cost."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eldr.engine.kernels import reducer_for
from eldr.engine.kernels.contract import StepWork
from eldr.engine.signature_cache import SignatureCache

pytestmark = pytest.mark.engine

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def picks(rng: np.random.Generator, tokens: int) -> np.ndarray:
    ids = [[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(tokens)]
    return np.array(ids, np.int32).reshape(tokens, LAYERS, TOP_K)


def total_of(ids: np.ndarray) -> np.ndarray:
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    for token in ids:
        for layer, chosen in enumerate(token):
            counts[layer, chosen] += 1
    return counts


class Cache(SignatureCache):
    """A cache with the reducer that writes it."""

    def __init__(self, block_size: int, blocks: int = 6) -> None:
        super().__init__(blocks, LAYERS, EXPERTS, block_size, "cpu")
        self._reducer = reducer_for("cpu", LAYERS, EXPERTS, TOP_K, self)

    def add(self, slots: np.ndarray, ids: np.ndarray) -> None:
        self._reducer.reduce(StepWork(torch.from_numpy(ids), torch.from_numpy(slots)))


@given(seed=st.integers(0, 2**32 - 1), block_size=st.sampled_from([1, 4, 16]))
def test_rows_hold_exactly_the_tokens_that_their_blocks_hold(seed: int, block_size: int) -> None:
    """Blocks are filled in chunks, evicted and reused in any order; every row equals its block's last tenants."""
    rng = np.random.default_rng(seed)
    cache = Cache(block_size)
    held: dict[int, list[np.ndarray]] = {}
    for _ in range(12):
        slots, ids = [], []
        for block in rng.permutation(6)[:2]:
            filled = len(held.get(block, []))
            start = 0 if filled == block_size or rng.random() < 0.3 else filled
            count = int(rng.integers(1, block_size - start + 1))
            new = picks(rng, count)
            held[block] = [*(held.get(block, [])[:start]), *new]
            slots += [block * block_size + start + i for i in range(count)]
            ids.append(new)
        order = rng.permutation(len(slots))
        cache.add(np.array(slots)[order], np.concatenate(ids)[order])
    for block, tokens in held.items():
        np.testing.assert_array_equal(cache.total([block]).numpy(), total_of(np.array(tokens)))
    everything = np.concatenate([np.array(tokens) for tokens in held.values()])
    np.testing.assert_array_equal(cache.total(list(held)).numpy(), total_of(everything))


def test_a_forgotten_block_keeps_nothing_of_its_earlier_owner() -> None:
    """Case 1.1: blocks that are filled from elsewhere."""
    cache = Cache(4)
    cache.add(np.arange(8), picks(np.random.default_rng(0), 8))
    cache.forget([1])
    assert int(cache.total([1]).sum()) == 0
    assert int(cache.total([0]).sum()) == 4 * LAYERS * TOP_K


@pytest.mark.parametrize(
    ("block_size", "dtype"), [(128, torch.uint8), (255, torch.uint8), (256, torch.int32)]
)
def test_a_full_block_of_one_expert_does_not_overflow(block_size: int, dtype: object) -> None:
    cache = Cache(block_size, blocks=2)
    assert cache.rows.dtype is dtype
    cache.add(np.arange(block_size), np.tile(np.array([0, 1], np.int32), (block_size, LAYERS, 1)))
    assert cache.total([0])[0, :2].tolist() == [block_size, block_size]


def test_a_prompt_of_70000_tokens_does_not_overflow_16_bits() -> None:
    cache = Cache(128, blocks=547)
    cache.add(np.arange(70_000), np.tile(np.array([0, 1], np.int32), (70_000, LAYERS, 1)))
    assert int(cache.total(list(range(547)))[0, 0]) == 70_000


def test_the_cache_of_a_model_like_qwen3_30b_a3b_takes_6_kib_a_block() -> None:
    """0.4 % of the KV of a block of 16 tokens: 48 layers, 4 KV heads of 128, K and V in 2 bytes."""
    cache = SignatureCache(3, 48, 128, 16, "cpu")
    assert cache.nbytes == 3 * 6144
    assert cache.nbytes / 3 <= 0.004 * (16 * 48 * 4 * 128 * 2 * 2)


def test_rows_of_a_number_of_experts_that_fills_no_word_are_padded_to_one() -> None:
    cache = SignatureCache(2, 3, 6, 16, "cpu")
    assert cache.rows.shape == (2, 3, 6)
    assert cache.nbytes == 2 * 3 * 8

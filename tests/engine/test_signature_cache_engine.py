"""The block-indexed rows against a plain reference that keeps every token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def cache_of(block_size: int, blocks: int = 6) -> SignatureCache:
    return SignatureCache(blocks, LAYERS, EXPERTS, block_size, "cpu")


@given(seed=st.integers(0, 2**32 - 1), block_size=st.sampled_from([1, 4, 16]))
def test_rows_hold_exactly_the_tokens_that_their_blocks_hold(seed: int, block_size: int) -> None:
    """Blocks are filled in chunks, evicted and reused in any order; every row equals its block's last tenants."""
    rng = np.random.default_rng(seed)
    cache = cache_of(block_size)
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
        stacked = np.concatenate(ids)
        cache.add(torch.tensor(slots)[order], torch.from_numpy(stacked[order]))
    for block, tokens in held.items():
        np.testing.assert_array_equal(cache.total([block]).numpy(), total_of(np.array(tokens)))
    everything = np.concatenate([np.array(tokens) for tokens in held.values()])
    np.testing.assert_array_equal(cache.total(list(held)).numpy(), total_of(everything))


def test_padding_rows_contribute_nothing() -> None:
    """Case 1.7: 5 real tokens padded to 8, the padding always picks expert 2."""
    cache = cache_of(8)
    ids = np.concatenate([picks(np.random.default_rng(0), 5), np.full((3, LAYERS, TOP_K), 2, np.int32)])
    slots = torch.tensor([0, 1, 2, 3, 4, -1, -1, -1])
    cache.add(slots, torch.from_numpy(ids))
    assert (cache.total([0]).sum(dim=1) == 5 * TOP_K).all()
    np.testing.assert_array_equal(cache.total([0]).numpy(), total_of(ids[:5]))


def test_a_layer_that_was_not_captured_counts_nothing() -> None:
    """Case 1.6: the sums then disagree between layers, which the hand-off refuses."""
    cache = cache_of(8)
    ids = picks(np.random.default_rng(0), 4)
    ids[:, 1] = -1
    cache.add(torch.arange(4), torch.from_numpy(ids))
    assert cache.total([0]).sum(dim=1).tolist() == [8, 0, 8]


def test_a_forgotten_block_keeps_nothing_of_its_earlier_owner() -> None:
    """Case 1.1: blocks that are filled from elsewhere."""
    cache = cache_of(4)
    cache.add(torch.arange(8), torch.from_numpy(picks(np.random.default_rng(0), 8)))
    cache.forget([1])
    assert int(cache.total([1]).sum()) == 0
    assert int(cache.total([0]).sum()) == 4 * LAYERS * TOP_K


@pytest.mark.parametrize(
    ("block_size", "dtype"), [(128, torch.uint8), (255, torch.uint8), (256, torch.int32)]
)
def test_a_full_block_of_one_expert_does_not_overflow(block_size: int, dtype: object) -> None:
    cache = cache_of(block_size, blocks=2)
    assert cache.rows.dtype is dtype
    ids = np.tile(np.array([0, 1], np.int32), (block_size, LAYERS, 1))
    cache.add(torch.arange(block_size), torch.from_numpy(ids))
    assert cache.total([0])[0, :2].tolist() == [block_size, block_size]


def test_strided_ids_count_like_contiguous_ones() -> None:
    """Case 1.22."""
    ids = torch.from_numpy(picks(np.random.default_rng(3), 8))
    wide = torch.zeros((8, LAYERS, 5), dtype=torch.int32)
    wide[:, :, :TOP_K] = ids
    plain, strided = cache_of(8), cache_of(8)
    plain.add(torch.arange(8), ids)
    strided.add(torch.arange(8), wide[:, :, :TOP_K])
    assert torch.equal(plain.rows, strided.rows)


def test_a_prompt_of_70000_tokens_does_not_overflow_16_bits() -> None:
    cache = cache_of(128, blocks=547)
    ids = np.tile(np.array([0, 1], np.int32), (70_000, LAYERS, 1))
    cache.add(torch.arange(70_000), torch.from_numpy(ids))
    assert int(cache.total(list(range(547)))[0, 0]) == 70_000

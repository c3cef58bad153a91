"""The reduction as one Triton kernel.

Ownership instead of a grid-wide barrier: the program (layer, shard) is the only one that touches the cells of its
layer and of its 32 experts, in the rows of all blocks. What must happen in order (empty, count, sum) is therefore
ordered by barriers within one program, and one launch does a whole step. Picks are read by every shard of their
layer, and only the owner of an expert acts on them.

Bytes are counted four to a word, because there are no atomic adds on bytes: expert e adds 1 << 8 * (e % 4) to the
word e // 4. No carry ever crosses into the neighbouring byte. A byte counts tokens of one block that selected one
expert; the block's slots are distinct and each is counted at most once after the row was emptied, a token selects
an expert at most once, and so the byte never exceeds block_size, which is at most 255 wherever rows are bytes. In
an addition of 1 << 8 * i to a word whose byte i is at most 254 nothing leaves byte i, and the partial sums of
concurrent adds are bounded by their total. (The sum of the top byte may set the word's sign bit: two's complement
addition leaves the bits the same.)

The union takes 32 experts in one word. numpy.packbits puts expert 0 in the high bit of the first byte, which in a
little-endian word is bit e ^ 7 for expert e.
"""

# Constants of the compilation are written in capitals, as Triton does.
# ruff: noqa: N803, N806

import triton
import triton.language as tl

SHARD = 32
"""Experts of one program: one word of the union."""


@triton.jit(
    do_not_specialize=[
        "tokens",
        "slotted",
        "slots_at",
        "blocks",
        "forgets",
        "completes",
        "ends_at",
        "blocks_at",
        "wants",
        "wanted_at",
    ],
    do_not_specialize_on_alignment=["ids", "slots"],
)
def reduce_step(
    ids,  # int32 [tokens, LAYERS, TOP_K]
    slots,  # int64; the step's begin at slots_at
    plan,  # int64 [forget | ends | blocks of complete prompts | wanted slots | ...]
    cells,  # rows [blocks, LAYERS, ROW] as uint8 or int32
    words,  # the same memory as int32
    out,  # int32 [LAYERS * (shards + 1) | counts [completes, LAYERS, EXPERTS] | picks [wants, LAYERS, TOP_K]]
    tokens,
    slotted,  # tokens with a slot: all or none
    slots_at,
    blocks,
    forgets,
    completes,
    ends_at,
    blocks_at,
    wants,
    wanted_at,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PACKED: tl.constexpr,  # rows are bytes
    HAS_ROWS: tl.constexpr,
    PICKS: tl.constexpr,  # TOP_K rounded up to a power of two
    TILE: tl.constexpr,  # tokens at a time
    SHARD: tl.constexpr,
):
    """One step of `StepReducer` for one layer and one shard of experts."""
    layer = tl.program_id(0)
    shard = tl.program_id(1)
    shards = tl.num_programs(1)
    LANES: tl.constexpr = 4 if PACKED else 1
    word = shard * (SHARD // LANES) + tl.arange(0, SHARD // LANES)
    word_in_row = word[None, :] < ROW // LANES
    row_words: tl.constexpr = ROW // LANES
    in_tile = tl.arange(0, TILE)

    if HAS_ROWS:
        for start in range(0, forgets, TILE):
            live = start + in_tile < forgets
            block = tl.load(plan + start + in_tile, mask=live, other=0)
            cell = (block * LAYERS + layer)[:, None] * row_words + word[None, :]
            tl.store(words + cell, 0, mask=live[:, None] & word_in_row)
        for start in range(0, slotted, TILE):
            live = start + in_tile < slotted
            slot = tl.load(slots + slots_at + start + in_tile, mask=live, other=-1)
            block = slot // BLOCK_SIZE
            first = (slot >= 0) & (slot % BLOCK_SIZE == 0) & (block < blocks)
            cell = (block * LAYERS + layer)[:, None] * row_words + word[None, :]
            tl.store(words + cell, 0, mask=first[:, None] & word_in_row)
        tl.debug_barrier()

    pick_of = tl.arange(0, PICKS)
    touched = tl.zeros([TILE, PICKS], tl.int32)
    missing = tl.zeros([TILE, PICKS], tl.int32)
    for start in range(0, tokens, TILE):
        token = start + in_tile
        there = (token < tokens)[:, None] & (pick_of < TOP_K)[None, :]
        place = token.to(tl.int64)[:, None] * (LAYERS * TOP_K) + layer * TOP_K + pick_of[None, :]
        expert = tl.load(ids + place, mask=there, other=-1)
        known = there & (expert >= 0) & (expert < EXPERTS)
        missing = missing | (there & (known == 0)).to(tl.int32)
        mine = known & (expert // SHARD == shard)
        touched = touched | tl.where(mine, 1 << ((expert ^ 7) % SHARD), 0)
        if HAS_ROWS:
            slot = tl.load(slots + slots_at + token, mask=token < slotted, other=-1)
            block = slot // BLOCK_SIZE
            real = (slot >= 0) & (block < blocks)
            cell = (block * LAYERS + layer)[:, None] * row_words + expert // LANES
            one = 1 << (8 * (expert % LANES))
            tl.atomic_add(words + cell, one, mask=mine & real[:, None], sem="relaxed")
    tl.store(out + layer * (shards + 1) + shard, tl.reduce_or(tl.reduce_or(touched, 1), 0))
    any_missing = tl.max(tl.max(missing, 1), 0)
    tl.store(out + layer * (shards + 1) + shards, any_missing, mask=shard == 0)

    results = out + LAYERS * (shards + 1)
    if HAS_ROWS:
        tl.debug_barrier()
        column = shard * SHARD + tl.arange(0, SHARD)
        real_column = column < EXPERTS
        for prompt in range(completes):
            begin = tl.load(plan + ends_at + prompt).to(tl.int32)
            end = tl.load(plan + ends_at + prompt + 1).to(tl.int32)
            total = tl.zeros([SHARD], tl.int32)
            for start in range(begin, end, TILE):
                live = start + in_tile < end
                block = tl.load(plan + blocks_at + start + in_tile, mask=live, other=0)
                cell = (block * LAYERS + layer)[:, None] * ROW + column[None, :]
                # Past the first cache level, which the adds above went around.
                count = tl.load(
                    cells + cell, mask=live[:, None] & real_column[None, :], other=0, cache_modifier=".cg"
                )
                total += tl.sum(count.to(tl.int32), 0)
            tl.store(results + (prompt * LAYERS + layer) * EXPERTS + column, total, mask=real_column)

    results += completes * LAYERS * EXPERTS
    WANT: tl.constexpr = 16
    for start in range(shard * WANT, wants, shards * WANT):
        want = start + tl.arange(0, WANT)
        slot_wanted = tl.load(plan + wanted_at + want, mask=want < wants, other=-1)
        row = tl.full([WANT], -1, tl.int32)
        for first_token in range(0, slotted, TILE):
            token = first_token + in_tile
            slot = tl.load(slots + slots_at + token, mask=token < slotted, other=-2)
            same = slot_wanted[:, None] == slot[None, :]
            row = tl.maximum(row, tl.max(tl.where(same, token[None, :], -1), 1))
        place = row.to(tl.int64)[:, None] * (LAYERS * TOP_K) + layer * TOP_K + pick_of[None, :]
        column_there = (pick_of < TOP_K)[None, :]
        found = tl.load(ids + place, mask=(row >= 0)[:, None] & column_there, other=-1)
        place = (want[:, None] * LAYERS + layer) * TOP_K + pick_of[None, :]
        tl.store(results + place, found, mask=(want < wants)[:, None] & column_there)

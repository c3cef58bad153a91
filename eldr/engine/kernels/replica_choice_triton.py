"""`fewest-activated` as one Triton kernel: every program makes the whole choice, then maps its own part of the picks.

Repeating the choice costs less than a second launch or a barrier across programs, because decode steps are small.
"""

# Constants of the compilation are written in capitals, as Triton does.
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from eldr.engine.kernels.replica_choice import tables
from eldr.placement import Geometry, Replicas

TILE = 64
"""Picks at a time."""


@triton.jit(do_not_specialize=["picks", "choosers"])
def choose_replicas(
    ids,  # [picks] logical
    out,  # [picks] physical
    first,  # int32 [EXPERTS]
    rank,  # int32 [EXPERTS]
    order,  # int32 [choosers]
    slot_on,  # int32 [choosers, RANKS]
    picks,
    choosers,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE_EXPERTS: tl.constexpr,  # rounded up to powers of two
    WIDE_RANKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The choice for one layer and step."""
    expert = tl.arange(0, WIDE_EXPERTS)
    on = tl.arange(0, WIDE_RANKS)
    column = tl.program_id(0)
    columns = tl.num_programs(0)
    activated = tl.zeros([WIDE_EXPERTS], tl.int32)
    for start in range(0, picks, TILE):
        place = start + tl.arange(0, TILE)
        pick = tl.load(ids + place, mask=place < picks, other=-1).to(tl.int32)
        activated = tl.maximum(activated, tl.max((pick[:, None] == expert[None, :]).to(tl.int32), 0))
    activated = tl.where(expert < EXPERTS, activated, 0)
    slot = tl.load(first + expert, mask=expert < EXPERTS, other=-1)
    home = tl.load(rank + expert, mask=expert < EXPERTS, other=-1)
    count = tl.sum(tl.where(home[:, None] == on[None, :], activated[:, None], 0), 0)
    never: tl.constexpr = 1 << 20
    for turn in range(2 * choosers):
        row = turn % choosers
        again = turn >= choosers
        who = tl.load(order + row)
        wanted = tl.sum(tl.where(expert == who, activated, 0), 0)
        slots = tl.load(slot_on + row * RANKS + on, mask=on < RANKS, other=-1)
        own = tl.sum(tl.where(expert == who, slot, 0), 0)
        # A rank has the slots in the order of the ranks, so the lowest rank is the lowest slot. In the second
        # pass the expert's own rank counts without it, and wins a tie.
        mine = (slots == own) & again
        load = tl.where(slots >= 0, 2 * count, never) - tl.where(mine, 2 * wanted + 1, 0)
        least = tl.min(load, 0)
        best = tl.min(tl.where(load == least, on, WIDE_RANKS), 0)
        count = count - tl.where(mine, wanted, 0)
        count = count + tl.where(on == best, wanted, 0)
        new = tl.sum(tl.where(on == best, slots, 0), 0)
        slot = tl.where((expert == who) & (wanted > 0), new, slot)
    for start in range(column * TILE, picks, columns * TILE):
        place = start + tl.arange(0, TILE)
        pick = tl.load(ids + place, mask=place < picks, other=-1).to(tl.int32)
        same = pick[:, None] == expert[None, :]
        physical = tl.sum(tl.where(same, slot[None, :] + 1, 0), 1) - 1
        tl.store(out + place, physical, mask=place < picks)


class DeviceChoice:
    """The choice of one layer on a device's current stream: one launch, nothing on the host."""

    def __init__(self, replicas: Replicas, geometry: Geometry, device: torch.device) -> None:
        self._geometry = geometry
        self._choosers = len(replicas.order)
        self._tables = {
            name: torch.as_tensor(table, device=device) for name, table in tables(replicas, geometry).items()
        }

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.contiguous()
        out = torch.empty_like(flat)
        geometry = self._geometry
        programs = max(1, min(64, -(-flat.numel() // TILE)))
        choose_replicas[(programs,)](
            flat,
            out,
            **self._tables,
            picks=flat.numel(),
            choosers=self._choosers,
            EXPERTS=geometry.experts,
            RANKS=geometry.ranks,
            WIDE_EXPERTS=triton.next_power_of_2(geometry.experts),
            WIDE_RANKS=triton.next_power_of_2(geometry.ranks),
            TILE=TILE,
        )
        return out

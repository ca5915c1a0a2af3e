"""Keys: count the keys of the union into their cells, and clear the output at the same time.

The grid's first axis divides the words, the second the partitions of the table. So programs that
run at the same time use one partition, which fits the cache even if the table does not. Additions
to entries keep the cache busy and the memory idle, so the same programs fill the output with zeros,
or with NaN if any rank's poison word is set; :mod:`.peel` then writes the keys it recovers.

Worked example (2 hashes): key 2 with the hashes 0x11112222 and 0x33334444 adds 0x2222_0001 to one
packed entry and 0x4444_0001 to another, 0x2_00000001 to both of split ones.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .hashing import cell_at, hash_of
from .jit import jit, tl
from .stash import LANES_OF_A_STEP, STASH, STASH_WORDS, pop, push_bits
from .table import Table, listing_programs, packed

# Elements that a program clears at a time.
_FILL = 1024


@jit
def contribution(key, h, PACKED: tl.constexpr):
    """The number that a key with the hash ``h`` adds to an entry; int64."""
    if PACKED:
        return ((h & 0xFFFF).to(tl.int64) << 16) + 1
    else:
        return (key.to(tl.int64) << 32) + 1


@jit(do_not_specialize=["words", "partition", "seed", "stats"])
def keys_kernel(
    union, entry, stash, stats, seed, out, n, words, partition,
    WORDS: tl.constexpr, STASH: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
    PACKED: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1)
    programs = tl.num_programs(0)
    turn = (tl.program_id(0) + i * programs).to(tl.int64)
    fill = tl.zeros([FILL], tl.float32)
    if not RAW:
        fill = tl.where(tl.load(union + words) != 0, float("nan"), fill)
    dtype: tl.constexpr = out.dtype.element_ty
    for start in range(turn * FILL, n, programs * tl.num_programs(1) * FILL):
        j = start + tl.arange(0, FILL)
        tl.store(out + j, fill.to(dtype), mask=j < n)

    seed_value = tl.load(seed)
    mine = stash + turn * STASH
    count = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for first in range(tl.program_id(0) * WORDS, words, programs * WORDS):
        before = count
        count = push_bits(mine, count, union, first, words, WORDS)
        total += count - before
        flush = first + programs * WORDS >= words
        while (count >= BLOCK) | (flush & (count > 0)):
            item = pop(mine, count, BLOCK)
            count = tl.maximum(count - BLOCK, 0)
            key = item.to(tl.uint32, bitcast=True)
            h = hash_of(key, seed_value, i)
            more = contribution(key, h, PACKED)
            tl.atomic_add(entry + cell_at(h, partition, i), more, mask=item >= 0, sem="relaxed")
    if (i == 0) & (total > 0):
        tl.atomic_add(stats, total, sem="relaxed")


def count_keys(
    seed: Tensor, stats: Tensor, out: Tensor, table: Table, *, layout: SketchLayout, raw: bool
) -> None:
    """Count keys into ``table.entry`` and ``stats[0]``; clear ``out``.

    Args:
        out: ``[n]`` elements, or ``[groups]`` symbols.
        raw: whether ``out`` takes symbols.
    """
    if layout.groups == 0:
        return
    programs = listing_programs(layout.words, layout.hashes)
    keys_kernel[(programs, layout.hashes)](
        table.open, table.entry, table.stash, stats, seed, out, out.shape[0], layout.words,
        layout.partition, WORDS=STASH_WORDS, STASH=STASH, BLOCK=LANES_OF_A_STEP, FILL=_FILL,
        PACKED=packed(layout), RAW=raw, num_warps=1,
    )  # fmt: skip

"""Layouts like those of a model, but small: the same kernels take them, as far as that depends on a
layout, and the reference is done with them at once.

Kernels are compiled anew where a number is a multiple of 16. So numbers of blocks, rows and words
leave the same rest.
"""

from __future__ import annotations

from dataclasses import replace

from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout
from tagc.ops.sketch import SketchLayout

# Blocks, rows, words of a bitmap: a few programs' worth.
_BLOCKS, _ROWS, _WORDS = 5, 16, 70
# Columns of all matrices and destinations, from which on kernels take more of them at a time.
_COLUMNS = 67_584
# Cells of a partition, from which on kernels pack what they know of a cell, and words of a bitmap
# with keys for it.
_PARTITION, _WORDS_OF_LARGE = 65_600, 1000


def shortened(numel: int, unit: int, units: int, rest: int = 16) -> int:
    """``units`` times ``unit`` elements or a few more: so many units that ``numel`` has the same
    rest, of units divided by ``rest`` and of elements divided by ``unit``; at most ``numel``."""
    units += (numel // unit - units) % rest
    return min(numel, units * unit + numel % unit)


def small_blocks(layout: BlockLayout) -> BlockLayout:
    """A few blocks, the last as full as it was."""
    units = max(_BLOCKS, 2048 // layout.block)
    # Two scales share a word.
    return replace(layout, numel=shortened(layout.numel, layout.block, units, rest=32))


def small_matrix(layout: MatrixLayout) -> MatrixLayout:
    """A few rows of at most two matrices; all columns, since kernels treat long rows otherwise than
    short ones."""
    rows = min(layout.rows, _ROWS + layout.rows % 16)
    return replace(layout, rows=rows, count=min(layout.count, 2))


def small_matrices(layout: MatrixLayout, destinations: int) -> tuple[MatrixLayout, int]:
    """:func:`small_matrix`, and at most two destinations; more of both where kernels treat many
    columns otherwise than few."""
    small = small_matrix(layout)
    columns = min(_COLUMNS, destinations * layout.count * layout.columns)
    few = -(-columns // (small.count * layout.columns))
    destinations = min(destinations, max(2, few))
    count = max(small.count, -(-columns // (destinations * layout.columns)))
    return replace(small, count=count), destinations


def small_packed(layout: PackedLayout) -> PackedLayout:
    """A few words of a bitmap, and as large a share of the groups."""
    numel = shortened(layout.numel, 32 * layout.group, _WORDS)
    groups = -(-numel // layout.group)
    capacity = _share(layout.capacity, layout.groups, groups)
    values = replace(layout.values, numel=capacity * layout.group)
    return replace(layout, numel=numel, capacity=capacity, values=values)


def small_sketch(layout: SketchLayout, capacity: int) -> tuple[SketchLayout, int]:
    """A few words of a bitmap; a table with room for as large a share of the keys, and the
    capacity. A large table stays so large that kernels treat it as one. What is small stays."""
    lanes = layout.symbol.lanes
    large = not layout.direct and layout.partition >= _PARTITION
    numel = shortened(layout.numel, 32 * lanes, _WORDS_OF_LARGE if large else _WORDS)
    if numel == layout.numel and not large:
        return layout, capacity
    groups = -(-numel // lanes)
    keys = _share(layout.keys, layout.groups, groups)
    partition = groups
    if not layout.direct:
        # Small tables need more room for each key.
        partition = max(32, 2 * _share(layout.partition, layout.groups, groups))
    if large:
        partition = _PARTITION + layout.partition % 16
    small = replace(layout, numel=numel, keys=keys, partition=partition)
    return small, _share(capacity, layout.groups, groups)


def _share(part: int, whole: int, of: int) -> int:
    """``part / whole`` of ``of``, rounded down, but some of some; all of it only where ``part`` is
    all."""
    if part >= whole:
        return of
    return min(max(part * of // whole, min(part, 1)), max(0, of - 1))

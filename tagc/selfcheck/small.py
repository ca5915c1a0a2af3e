"""Layouts like those of a model, but small: the same kernels take them, as far as that depends on a
layout, and the reference is done with them at once."""

from __future__ import annotations

from dataclasses import replace

from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout
from tagc.ops.sketch import SketchLayout

# Blocks, rows, words of a bitmap: a few programs' worth.
_BLOCKS, _ROWS, _WORDS = 5, 12, 70


def shortened(numel: int, unit: int, units: int) -> int:
    """At most about ``units`` times ``unit`` elements, with the same rest as ``numel`` has."""
    return min(numel, units * unit + numel % unit)


def small_blocks(layout: BlockLayout) -> BlockLayout:
    """A few blocks, the last as full as it was."""
    units = max(_BLOCKS, 2048 // layout.block)
    return replace(layout, numel=shortened(layout.numel, layout.block, units))


def small_matrix(layout: MatrixLayout) -> MatrixLayout:
    """A few rows of at most two matrices; all columns, since kernels treat long rows otherwise than
    short ones."""
    rows = min(layout.rows, _ROWS + layout.rows % 4)
    return replace(layout, rows=rows, count=min(layout.count, 2))


def small_packed(layout: PackedLayout) -> PackedLayout:
    """A few words of a bitmap, and as large a share of the groups."""
    numel = shortened(layout.numel, 32 * layout.group, _WORDS)
    groups = -(-numel // layout.group)
    capacity = _share(layout.capacity, layout.groups, groups)
    values = replace(layout.values, numel=capacity * layout.group)
    return replace(layout, numel=numel, capacity=capacity, values=values)


def small_sketch(layout: SketchLayout, capacity: int) -> tuple[SketchLayout, int]:
    """A few words of a bitmap; a table with room for as large a share of the keys, and the
    capacity."""
    lanes = layout.symbol.lanes
    numel = shortened(layout.numel, 32 * lanes, _WORDS)
    groups = -(-numel // lanes)
    keys = _share(layout.keys, layout.groups, groups)
    partition = groups
    if not layout.direct:
        # Small tables need more room for each key.
        partition = max(32, 2 * _share(layout.partition, layout.groups, groups))
    small = replace(layout, numel=numel, keys=keys, partition=partition)
    return small, _share(capacity, layout.groups, groups)


def _share(part: int, whole: int, of: int) -> int:
    """``part / whole`` of ``of``, rounded up; all of it only where ``part`` is all."""
    if part >= whole:
        return of
    return min(-(-part * of // whole), max(0, of - 1))

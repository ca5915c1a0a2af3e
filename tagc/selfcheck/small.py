"""Shrinks a model's layouts, so that the reference takes no time but the same kernels run, as far
as a layout decides that.

Triton compiles a kernel anew if a number is a multiple of 16. So the numbers of blocks, rows and
words keep their remainders.
"""

from __future__ import annotations

from dataclasses import replace

from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.sketch import SketchLayout

# Blocks, rows and words of a bitmap for a few programs.
_BLOCKS, _ROWS, _WORDS = 5, 16, 70
# From this many columns of all matrices and destinations, kernels process more columns at a time.
_COLUMNS = 67_584
# From this many cells of a partition, kernels pack their facts about a cell; words of a bitmap with
# enough keys for such a table.
_PARTITION, _WORDS_OF_LARGE = 65_600, 1000


def shortened(numel: int, unit: int, units: int, rest: int = 16) -> int:
    """``units * unit`` elements or a few more, at most ``numel``. The number of units has the same
    remainder modulo ``rest`` as in ``numel``, and the elements the same remainder modulo ``unit``.
    """
    units += (numel // unit - units) % rest
    return min(numel, units * unit + numel % unit)


def small_blocks(layout: BlockLayout) -> BlockLayout:
    """A few blocks; the last one is as full as in the model."""
    units = max(_BLOCKS, 2048 // layout.block)
    # Two scales share a word.
    return replace(layout, numel=shortened(layout.numel, layout.block, units, rest=32))


def small_matrix(layout: MatrixLayout) -> MatrixLayout:
    """A few rows of at most two matrices, with all columns, because kernels treat long and short
    rows differently."""
    rows = min(layout.rows, _ROWS + layout.rows % 16)
    return replace(layout, rows=rows, count=min(layout.count, 2))


def small_matrices(layout: MatrixLayout, destinations: int) -> tuple[MatrixLayout, int]:
    """:func:`small_matrix` with at most two destinations; more matrices and destinations if kernels
    treat many columns differently."""
    small = small_matrix(layout)
    columns = min(_COLUMNS, destinations * layout.count * layout.columns)
    few = -(-columns // (small.count * layout.columns))
    destinations = min(destinations, max(2, few))
    count = max(small.count, -(-columns // (destinations * layout.columns)))
    return replace(small, count=count), destinations


def small_sketch(layout: SketchLayout, capacity: int) -> tuple[SketchLayout, int]:
    """A few words of a bitmap, and a table and a capacity for the same share of the groups. A large
    table stays large enough for the kernels of large tables. Small layouts stay as they are."""
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
    """``part / whole`` of ``of``, rounded down, but at least 1 if ``part`` is. It is all of ``of``
    only if ``part`` is all of ``whole``."""
    if part >= whole:
        return of
    return min(max(part * of // whole, min(part, 1)), max(0, of - 1))

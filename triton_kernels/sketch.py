"""The sketch's operators: sequences of kernels.

Encode: :mod:`.select` (the one dense pass) marks groups and accumulates the residual, :mod:`.trim`
clears marks beyond the capacity, :mod:`.emit` quantizes what is left and adds it to the cells.
Decode: :mod:`.union` ORs the bitmaps and makes the peeling table, :mod:`.keys` lists the keys,
:mod:`.peel` or :mod:`.peel_float` recovers their symbols, :mod:`.estimate` owes what was not
recovered through the residual, :mod:`.write` dequantizes; a direct layout needs only the first and
the last of these. Insert and peel are the same table without a gradient: :mod:`.scatter` fills the
cells, :mod:`.expand` writes what peeling recovered.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .device import on_device_of
from .emit import emit
from .estimate import estimate
from .expand import expand
from .keys import list_keys
from .peel import peel_integers
from .peel_float import peel_floats
from .scatter import insert_kernel
from .scratch import buffer
from .select import select
from .table import Table, table_of
from .trim import trim
from .union import unite
from .write import write

# Words of the bitmap per program of insert, and its warps.
_WORDS = 16
_WARPS = 4


@on_device_of("grad")
def encode(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    step: Tensor,
    seed: Tensor,
    index: Tensor,
    cells: Tensor,
    counts: Tensor,
    *,
    layout: SketchLayout,
    levels: int,
    capacity: int,
    support: Tensor | None = None,
) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.encode`."""
    bitmap, poison = index[:, : layout.words], index[:, layout.words]
    lanes = layout.symbol.lanes
    select(
        grad, residual, threshold, bitmap, poison, counts,
        lanes=lanes, capacity=capacity, support=support,
    )  # fmt: skip
    if support is None:
        trim(grad, residual, bitmap, counts, lanes=lanes, capacity=capacity, layout=layout)
    emit(
        grad, residual, step, seed, index, cells, counts,
        layout=layout, levels=levels, capacity=capacity, counted=support is not None,
    )  # fmt: skip


@on_device_of("cells")
def decode(
    index: Tensor,
    cells: Tensor,
    step: Tensor,
    seed: Tensor,
    out: Tensor,
    residual: Tensor | None,
    stats: Tensor,
    *,
    layout: SketchLayout,
    divisor: int,
) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.decode`."""
    table = table_of(layout, cells.device)
    _recover(index, cells, seed, stats, table, layout)
    if not layout.direct:
        estimate(step, seed, residual, stats, table, layout=layout)
    write(cells, step, out, table, layout=layout, divisor=divisor)


@on_device_of("cells")
def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.insert`."""
    cells.zero_()
    if layout.groups == 0:
        return
    insert_kernel[(triton.cdiv(layout.words, _WORDS),)](
        symbols, index, seed, cells, layout.groups, layout.words, layout.partition,
        WORDS=_WORDS, HASHES=layout.hashes, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@on_device_of("cells")
def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    """See :meth:`tagc.ops.sketch.SketchOps.peel`."""
    symbols = torch.empty(layout.groups, dtype=cells.dtype, device=cells.device)
    stuck = torch.empty(layout.groups, dtype=torch.int8, device=cells.device)
    table = table_of(layout, cells.device)
    stats = buffer("stats", (2,), torch.int32, cells.device, layout)
    _recover(index[None], cells, seed, stats, table, layout)
    expand(cells, symbols, stuck, table, layout=layout)
    return symbols, stuck.view(torch.bool)


def _recover(
    index: Tensor, cells: Tensor, seed: Tensor, stats: Tensor, table: Table, layout: SketchLayout
) -> None:
    """Fill ``table`` from the bitmaps ``[W, ...]`` and the summed ``cells``, and peel it."""
    unite(index, cells, stats, table, layout=layout)
    if layout.direct:
        return
    list_keys(seed, table, layout=layout)
    if layout.symbol.integer:
        peel_integers(seed, stats, table, layout=layout)
    else:
        peel_floats(seed, stats, table, layout=layout)

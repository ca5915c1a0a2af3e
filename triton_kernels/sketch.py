"""The sketch's operators: sequences of kernels.

Encode: :mod:`.select` (the only dense pass) marks groups and accumulates the residual,
:mod:`.trim` clears marks beyond the capacity, :mod:`.emit` quantizes the remaining groups and adds
them to the cells. Decode: :mod:`.union` ORs the bitmaps and makes the peeling table, :mod:`.keys`
counts the keys into it and clears the output, :mod:`.peel` writes the recovered keys,
:mod:`.estimate` adds estimates of the others to the residual; for a direct layout :mod:`.write`
replaces all of these but the first. Insert and peel use the same table without a gradient:
:mod:`.scatter` fills the cells, :mod:`.expand` marks the keys that were not recovered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagc.ops import ABOVE, KEPT, NONZERO
from tagc.ops.sketch import SketchLayout

from .emit import emit
from .estimate import estimate
from .expand import expand
from .jit import on_device_of, torch_call
from .keys import count_keys
from .peel import peel_table
from .scatter import insert_symbols
from .scratch import buffer
from .select import select as select_groups
from .table import table_of
from .trim import cleared_histograms, put_off_of, trim
from .union import unite
from .write import write


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
    trims = support is None and capacity < layout.groups
    histograms = cleared_histograms(grad, layout) if trims else None
    # Whether the dense pass makes the sketch.
    in_one_pass = layout.direct and (residual is None or residual.dtype == torch.float32)
    direct: dict[str, Any] = {"cells": cells, "step": step, "levels": float(levels)}
    direct = direct if in_one_pass else {}
    select_groups(
        grad, residual, threshold, bitmap, poison, counts, layout=layout, capacity=capacity,
        support=support, put_off=None if histograms is None else put_off_of(histograms), **direct,
    )  # fmt: skip
    if histograms is not None:
        trim(
            grad, residual, threshold, bitmap, counts, histograms,
            layout=layout, capacity=capacity, **direct,
        )  # fmt: skip
    if not in_one_pass:
        emit(
            grad, residual, step, seed, index, cells, counts,
            layout=layout, levels=levels, capacity=capacity, counted=support is not None,
        )  # fmt: skip


@on_device_of("x")
def select(
    x: Tensor,
    threshold: Tensor,
    bitmap: Tensor,
    counts: Tensor,
    *,
    layout: SketchLayout,
    capacity: int,
) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.select`."""
    select_groups(x, None, threshold, bitmap, None, counts, layout=layout, capacity=capacity)
    if capacity < layout.groups:
        histograms = cleared_histograms(x, layout)
        trim(x, None, threshold, bitmap, counts, histograms, layout=layout, capacity=capacity)
        torch_call(_clamp, counts[:, ABOVE], capacity, counts[:, KEPT])
    else:
        torch_call(Tensor.copy_, counts[:, KEPT], counts[:, NONZERO])


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
    unite(index, cells, stats, table, layout=layout)
    if layout.direct:
        write(cells, step, out, stats, table, layout=layout, divisor=divisor)
        return
    count_keys(seed, stats, out, table, layout=layout, raw=False)
    peel_table(seed, step, out, table, layout=layout, divisor=divisor, raw=False)
    estimate(step, seed, residual, stats, table, layout=layout)


@on_device_of("cells")
def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.insert`."""
    insert_symbols(symbols, index, seed, cells, layout=layout)


@on_device_of("cells")
def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    """See :meth:`tagc.ops.sketch.SketchOps.peel`."""
    symbols = torch.empty(layout.groups, dtype=cells.dtype, device=cells.device)
    stuck = torch.empty(layout.groups, dtype=torch.int8, device=cells.device)
    table = table_of(layout, cells.device)
    stats = buffer("stats", (2,), torch.int32, cells.device, layout)
    unite(index[None], cells, stats, table, layout=layout)
    if not layout.direct:
        count_keys(seed, stats, symbols, table, layout=layout, raw=True)
        # Symbols stay as they are: neither step nor divisor matters.
        peel_table(seed, seed, symbols, table, layout=layout, divisor=1, raw=True)
    expand(cells, symbols, stuck, table, layout=layout)
    return symbols, stuck.view(torch.bool)


def _clamp(x: Tensor, most: int, out: Tensor) -> None:
    torch.clamp(x, max=most, out=out)

"""The operators of :class:`tagc.ops.Ops` as fixed sequences of Triton launches.

Which kernels run, with which grid and configuration, follows from the layout and dtypes alone, so
every rank launches the same, nothing waits for the device, and a CUDA graph can hold the sequence
(after one call outside of capture, which compiles the kernels). Buffers between the kernels are
kept, see :mod:`.scratch`; only :func:`peel` allocates, for its results.

Everything that is an integer and every residual of integer symbols has the same bits as the
reference on a CPU. ``float32`` symbols are summed in cells in no fixed order, as in any collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout
from tagc.ops.sketch import SketchLayout

from . import dequantize as _dequantize
from . import matrix_dequantize as _matrix_dequantize
from . import matrix_quantize as _matrix_quantize
from . import pack as _pack
from . import quantize as _quantize
from . import read_index as _read_index
from . import unpack as _unpack
from . import write_index as _write_index
from .emit import emit
from .estimate import estimate
from .expand import expand
from .keys import list_keys
from .peel import peel_integers
from .peel_float import peel_floats
from .scatter import insert as _insert
from .scratch import buffer
from .scratch import release as _release
from .select import select as _select
from .table import Table, table_of
from .trim import trim
from .union import unite
from .write import write


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
    """See :meth:`tagc.ops.Ops.encode`."""
    with torch.cuda.device_of(grad):
        bitmap, poison = index[:, : layout.words], index[:, layout.words]
        lanes = layout.symbol.lanes
        _select(
            grad, residual, threshold, bitmap, poison, counts,
            lanes=lanes, capacity=capacity, support=support,
        )  # fmt: skip
        if support is None:
            trim(grad, residual, bitmap, counts, lanes=lanes, capacity=capacity, layout=layout)
        emit(
            grad, residual, step, seed, index, cells, counts,
            layout=layout, levels=levels, capacity=capacity, counted=support is not None,
        )  # fmt: skip


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
    """See :meth:`tagc.ops.Ops.decode`."""
    with torch.cuda.device_of(cells):
        table = table_of(layout, cells.device)
        _recover(index, cells, seed, stats, table, layout)
        if not layout.direct:
            estimate(step, seed, residual, stats, table, layout=layout)
        write(cells, step, out, table, layout=layout, divisor=divisor)


def prepare(layout: SketchLayout, gradient: torch.dtype, residual: torch.dtype | None) -> None:
    """Nothing yet: kernels compile at their first launch, a few seconds in the first step."""


def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    """See :meth:`tagc.ops.Ops.insert`."""
    with torch.cuda.device_of(cells):
        _insert(symbols, index, seed, cells, layout=layout)


def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    """See :meth:`tagc.ops.Ops.peel`."""
    symbols = torch.empty(layout.groups, dtype=cells.dtype, device=cells.device)
    stuck = torch.empty(layout.groups, dtype=torch.int8, device=cells.device)
    with torch.cuda.device_of(cells):
        table = table_of(layout, cells.device)
        stats = buffer("stats", (2,), torch.int32, cells.device, layout)
        _recover(index[None], cells, seed, stats, table, layout)
        expand(cells, symbols, stuck, table, layout=layout)
    return symbols, stuck.view(torch.bool)


def _recover(
    index: Tensor, cells: Tensor, seed: Tensor, stats: Tensor, table: Table, layout: SketchLayout
) -> None:
    unite(index, cells, stats, table, layout=layout)
    if layout.direct:
        return
    list_keys(seed, table, layout=layout)
    if layout.symbol.integer:
        peel_integers(seed, stats, table, layout=layout)
    else:
        peel_floats(seed, stats, table, layout=layout)


def quantize(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: BlockLayout,
    average: float,
) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.quantize`."""
    with torch.cuda.device_of(grad):
        _quantize.quantize(grad, residual, message, layout=layout, average=average)


def dequantize(message: Tensor, out: Tensor, *, layout: BlockLayout, divisor: int) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.dequantize`."""
    with torch.cuda.device_of(out):
        _dequantize.dequantize(message, out, layout=layout, divisor=divisor)


def prepare_blocks(
    layout: BlockLayout, gradient: torch.dtype, residual: torch.dtype | None, average: float
) -> None:
    """Nothing yet, as :func:`prepare`."""


def quantize_matrix(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: MatrixLayout,
    average: float,
) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`."""
    with torch.cuda.device_of(grad):
        _matrix_quantize.quantize_matrix(grad, residual, message, layout=layout, average=average)


def dequantize_matrix(message: Tensor, out: Tensor, *, layout: MatrixLayout, divisor: int) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.dequantize_matrix`."""
    with torch.cuda.device_of(out):
        _matrix_dequantize.dequantize_matrix(message, out, layout=layout, divisor=divisor)


def prepare_matrix(
    layout: MatrixLayout, gradient: torch.dtype, residual: torch.dtype | None, average: float
) -> None:
    """Nothing yet, as :func:`prepare`."""


def pack(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    support: Tensor | None,
    message: Tensor,
    counts: Tensor,
    *,
    layout: PackedLayout,
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.pack`."""
    with torch.cuda.device_of(grad):
        _pack.pack(grad, residual, threshold, support, message, counts, layout=layout)


def unpack(
    message: Tensor, support: Tensor | None, out: Tensor, *, layout: PackedLayout, divisor: int
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.unpack`."""
    with torch.cuda.device_of(out):
        _unpack.unpack(message, support, out, layout=layout, divisor=divisor)


def select(
    x: Tensor, threshold: Tensor, bitmap: Tensor, counts: Tensor, *, layout: PackedLayout
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.select`."""
    with torch.cuda.device_of(x):
        _pack.select(x, threshold, bitmap, counts, layout=layout)


def write_index(bitmap: Tensor, index: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.write_index`."""
    with torch.cuda.device_of(bitmap):
        _write_index.write_index(bitmap, index, layout=layout)


def read_index(index: Tensor, bitmap: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.read_index`."""
    with torch.cuda.device_of(index):
        _read_index.read_index(index, bitmap, layout=layout)


def prepare_packed(
    layout: PackedLayout, gradient: torch.dtype, residual: torch.dtype | None
) -> None:
    """Nothing yet, as :func:`prepare`."""


def release() -> None:
    """See :meth:`tagc.ops.Ops.release`."""
    _release()

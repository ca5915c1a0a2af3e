"""The sketch's operators."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.ops import COUNTS
from tagc.ops.cpu.arrays import NO_SUPPORT, numpy_of, supports, words_of
from tagc.ops.cpu.compiling import once_a_host
from tagc.ops.cpu.kernels.bitmap import keys_of
from tagc.ops.cpu.kernels.decoder import decode_shard, read_cells
from tagc.ops.cpu.kernels.encoder import insert_shard, keep_marked, write_cells
from tagc.ops.cpu.kernels.peeler import recover
from tagc.ops.cpu.kernels.scalar import group_of
from tagc.ops.cpu.kernels.selection import keep_largest, select_groups
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS


def _hashes(layout: SketchLayout) -> int:
    """The kernels' number of hashes: 0 for a direct layout."""
    return 0 if layout.direct else layout.hashes


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
    if grad.dtype == torch.float16:  # numba has no float16 arithmetic on CPUs
        grad = grad.float()
    g, e, words = numpy_of(grad), numpy_of(residual), words_of(index)
    n, lanes, hashes = layout.numel, layout.symbol.lanes, _hashes(layout)
    group, groups = group_of(lanes), -(-n // lanes)
    marks = [NO_SUPPORT] * len(g) if support is None else supports(support, layout.groups)
    for d in range(grad.shape[0]):
        row = None if e is None else e[d]
        least = threshold[d].numpy().view(np.uint32)[()]
        chosen = least if capacity < groups else np.uint32(1)
        above, nonzero, kept, poison, keys, stream = select_groups(
            g[d], row, n, group, least, chosen, marks[d], capacity, words[d, :-1]
        )
        if support is not None:
            if poison:
                kept = keep_marked(lanes, kept, keys, stream, words[d, :-1])
        elif kept > capacity:
            keep_largest(lanes, capacity, kept, keys, stream, words[d, :-1])
            kept = capacity
        saturated = write_cells(
            row, n, group, step.numpy()[d], seed.numpy()[0], levels, keys[:kept], stream,
            hashes, layout.partition, cells[d].numpy(),
        )  # fmt: skip
        words[d, -1] = poison
        counts.numpy()[d] = above, nonzero, kept, saturated


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
    group, hashes = group_of(layout.symbol.lanes), _hashes(layout)
    wide = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float16 else out
    poisoned = decode_shard(
        np.bitwise_or.reduce(index.numpy(), axis=0), cells.numpy(), seed.numpy(), hashes,
        layout.partition, layout.numel, group, step.numpy(), divisor, numpy_of(wide),
        numpy_of(residual), stats.numpy(),
    )  # fmt: skip
    if poisoned:
        out.fill_(torch.nan)
    elif wide is not out:
        out.copy_(wide)


@once_a_host
def _compile(name: str, gradient: torch.dtype, residual: torch.dtype | None) -> None:
    """Run every kernel of encode and decode on small inputs."""
    symbol = SYMBOLS[name]
    one, seed = (
        torch.ones(1, dtype=torch.float32, device="cpu"),
        torch.zeros(1, dtype=torch.int32, device="cpu"),
    )
    counts, stats = (
        torch.empty(1, COUNTS, dtype=torch.int32, device="cpu"),
        torch.empty(2, dtype=torch.int32, device="cpu"),
    )
    for groups in (32, 1024):  # direct, and with a table that is too small for all groups
        layout = plan_layout(groups * symbol.lanes, symbol, 1)
        columns = torch.empty(1, layout.numel, dtype=gradient, device="cpu")
        left = None if residual is None else torch.zeros_like(columns, dtype=residual)
        index = torch.empty(1, layout.index_words, dtype=torch.int32, device="cpu")
        cells = torch.empty(1, layout.cells, dtype=torch.int32, device="cpu")
        # First more groups than the capacity, then a support of groups that are not finite.
        for value, support in ((1.0, None), (torch.nan, torch.ones_like(index[:, :-1]))):
            encode(
                columns.fill_(value), left, one, one, seed, index, cells, counts, layout=layout,
                levels=1, capacity=1, support=support,
            )  # fmt: skip
        index.fill_(-1)[:, -1] = 0  # all groups, not poisoned
        row = None if left is None else left[0]
        decode(index, cells[0], one, seed, columns[0], row, stats, layout=layout, divisor=1)


def prepare(layout: SketchLayout, gradient: torch.dtype, residual: torch.dtype | None) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.prepare`; takes seconds for new symbols or dtypes."""
    _compile(layout.symbol.name, gradient, residual)
    if layout.direct and residual is not None:
        _compile_select(layout.symbol.name, residual)


@once_a_host
def _compile_select(name: str, dtype: torch.dtype) -> None:
    """Run :func:`select` on a small input that exceeds the capacity."""
    layout = plan_layout(2 * SYMBOLS[name].lanes, SYMBOLS[name], 2)
    x = torch.ones(1, layout.numel, dtype=dtype, device="cpu")
    bitmap = torch.empty(1, layout.words, dtype=torch.int32, device="cpu")
    counts = torch.empty(1, COUNTS, dtype=torch.int32, device="cpu")
    select(x, x[:, 0].float(), bitmap, counts, layout=layout, capacity=1)


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
    rows, words = numpy_of(x), words_of(bitmap)
    lanes = layout.symbol.lanes
    for r in range(x.shape[0]):
        least = threshold[r].numpy().view(np.uint32)[()]
        chosen = least if capacity < layout.groups else np.uint32(1)
        above, nonzero, kept, _, keys, stream = select_groups(
            rows[r], None, layout.numel, group_of(lanes), least, chosen, NO_SUPPORT, capacity,
            words[r],
        )  # fmt: skip
        if kept > capacity:
            keep_largest(lanes, capacity, kept, keys, stream, words[r])
        counts.numpy()[r] = above, nonzero, min(kept, capacity), 0


def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.insert`."""
    insert_shard(
        symbols.numpy(), words_of(index), seed.numpy()[0], _hashes(layout), layout.partition,
        cells.numpy(),
    )  # fmt: skip


def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    """See :meth:`tagc.ops.sketch.SketchOps.peel`."""
    keys = keys_of(words_of(index))
    symbols = torch.zeros(layout.groups, dtype=torch.int32, device="cpu")
    stuck = torch.zeros(layout.groups, dtype=torch.bool, device="cpu")
    if layout.direct:
        symbols.numpy()[keys] = read_cells(keys, cells.numpy())
    else:
        values, done, _, _ = recover(
            keys, seed.numpy()[0], layout.hashes, layout.partition, cells.numpy().copy()
        )
        symbols.numpy()[keys], stuck.numpy()[keys] = values, done == 0
    return symbols, stuck

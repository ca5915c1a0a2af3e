"""The sketch's operators."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.ops import COUNTS
from tagc.ops.cpu.arrays import NO_SUPPORT, numpy_of, supports, words_of
from tagc.ops.cpu.compiling import once_a_host
from tagc.ops.cpu.kernels.decoder import decode_shard, peel_shard
from tagc.ops.cpu.kernels.encoder import encode_row, insert_shard
from tagc.ops.cpu.kernels.scalar import group_of
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS


def _hashes(layout: SketchLayout) -> int:
    """What the kernels take for the number of hashes: 0 for a direct layout."""
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
    cells_, counts_ = cells.numpy(), counts.numpy()
    thresholds, steps = threshold.numpy(), step.numpy()
    group = group_of(layout.symbol.lanes)
    marks = [NO_SUPPORT] * len(g) if support is None else supports(support, layout.groups)
    for d in range(grad.shape[0]):
        encode_row(
            g[d], None if e is None else e[d], layout.numel, group, thresholds[d],
            steps[d], seed.numpy()[0], levels, capacity, _hashes(layout), layout.partition,
            marks[d], words[d], cells_[d], counts_[d],
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
    """See :meth:`tagc.ops.sketch.SketchOps.decode`."""
    wide = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float16 else out
    union, stuck = decode_shard(
        np.bitwise_or.reduce(words_of(index), axis=0), cells.numpy(), layout.numel,
        group_of(layout.symbol.lanes), step.numpy()[0], seed.numpy()[0], np.float32(divisor),
        _hashes(layout), layout.partition, numpy_of(wide), numpy_of(residual),
    )  # fmt: skip
    if wide is not out:
        out.copy_(wide)
    stats[0], stats[1] = int(union), int(stuck)


@once_a_host
def _compile(name: str, gradient: torch.dtype, residual: torch.dtype | None) -> None:
    """Run encode and decode once on the smallest input of these dtypes."""
    layout = plan_layout(32, SYMBOLS[name], 1)
    columns = torch.zeros(1, 32, dtype=gradient)
    left = None if residual is None else torch.zeros(1, 32, dtype=residual)
    index = torch.empty(1, layout.index_words, dtype=torch.int32)
    cells = torch.empty(1, layout.cells, dtype=layout.symbol.dtype)
    one, seed = torch.ones(1, dtype=torch.float32), torch.zeros(1, dtype=torch.int32)
    counts, stats = torch.empty(1, COUNTS, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    encode(columns, left, one, one, seed, index, cells, counts, layout=layout, levels=1, capacity=1)
    row = None if left is None else left[0]
    decode(index, cells[0], one, seed, columns[0], row, stats, layout=layout, divisor=1)


def prepare(layout: SketchLayout, gradient: torch.dtype, residual: torch.dtype | None) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.prepare`; seconds for new symbols or dtypes."""
    _compile(layout.symbol.name, gradient, residual)


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
    symbols = torch.empty(layout.groups, dtype=cells.dtype)
    stuck = torch.empty(layout.groups, dtype=torch.bool)
    peel_shard(
        cells.numpy(), words_of(index), seed.numpy()[0], _hashes(layout),
        layout.partition, symbols.numpy(), stuck.numpy(),
    )  # fmt: skip
    return symbols, stuck

"""The sketch's operators."""

from __future__ import annotations

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from tagc.ops.cpu.arrays import (
    F,
    N,
    U,
    compiled,
    group_of,
    load,
    numpy_of,
    store,
    store_finite,
    widened,
    words_of,
)
from tagc.ops.cpu.peeling import cell_of, recover, salts_of
from tagc.ops.cpu.selecting import choose, keys_of, measure, quantize_groups
from tagc.ops.sketch import SketchLayout

_NO_SUPPORT = np.empty(0, np.uint32)


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
    support: Tensor | None = None,
    *,
    layout: SketchLayout,
    levels: int,
    capacity: int,
) -> None:
    g, e, words = numpy_of(widened(grad)), numpy_of(residual), words_of(index)
    group = group_of(layout.symbol.lanes)
    sizes = np.empty(layout.groups, np.uint32)
    for d in range(grad.shape[0]):
        row = None if e is None else e[d]
        bitmap = words[d, :-1]
        measure(g[d], row, layout.numel, group, sizes)
        above, nonzero, kept, poisoned = choose(
            sizes, threshold.numpy().view(np.uint32)[d], capacity,
            _NO_SUPPORT if support is None else words_of(support[d]), bitmap,
        )  # fmt: skip
        keys, symbols = np.empty(kept, np.uint32), np.empty(kept, np.int32)
        saturated = quantize_groups(
            g[d], row, layout.numel, group, sizes, bitmap, step.numpy()[d], levels, keys, symbols
        )
        _insert(keys, symbols, seed.numpy()[0], _hashes(layout), layout.partition, cells[d].numpy())
        words[d, -1] = poisoned
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
    words = np.bitwise_or.reduce(index.numpy(), axis=0).view(np.uint32)
    wide = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float16 else out
    stats.numpy()[:] = _decode(
        words[:-1], cells.numpy(), seed.numpy()[0], _hashes(layout), layout.partition,
        layout.numel, group_of(layout.symbol.lanes), step.numpy()[0], F(divisor), numpy_of(wide),
        numpy_of(residual),
    )  # fmt: skip
    if words[-1]:
        out.fill_(torch.nan)
    elif wide is not out:
        out.copy_(wide)


def select(
    x: Tensor,
    threshold: Tensor,
    bitmap: Tensor,
    counts: Tensor,
    *,
    layout: SketchLayout,
    capacity: int,
) -> None:
    rows, words = numpy_of(x), words_of(bitmap)
    sizes = np.empty(layout.groups, np.uint32)
    for r in range(x.shape[0]):
        measure(rows[r], None, layout.numel, group_of(layout.symbol.lanes), sizes)
        least = threshold.numpy().view(np.uint32)[r]
        above, nonzero, kept, _ = choose(sizes, least, capacity, _NO_SUPPORT, words[r])
        counts.numpy()[r] = above, nonzero, kept, 0


def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    keys = keys_of(words_of(index))
    _insert(
        keys, symbols.numpy()[keys], seed.numpy()[0], _hashes(layout), layout.partition,
        cells.numpy(),
    )  # fmt: skip


def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    keys = keys_of(words_of(index))
    symbols = torch.zeros(layout.groups, dtype=torch.int32, device="cpu")
    stuck = torch.zeros(layout.groups, dtype=torch.bool, device="cpu")
    if layout.direct:
        symbols.numpy()[keys] = cells.numpy()[keys]
    else:
        salts = salts_of(seed.numpy()[0], layout.hashes)
        values, done, _ = recover(keys, salts, layout.partition, cells.numpy().copy())
        symbols.numpy()[keys], stuck.numpy()[keys] = values, done == 0
    return symbols, stuck


@compiled
def _insert(keys, symbols, seed, hashes, partition, cells):
    """Sketch symbols.

    Args:
        keys, symbols: ``[count]`` uint32 and int32; keys are all different.
        seed: int32.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        cells: ``[cells]`` int32, written.
    """
    cells[:] = 0
    salts = salts_of(seed, hashes)
    if hashes == 0:
        for t in range(N(keys.size)):
            cells[keys[t]] = symbols[t]
    for i in range(hashes):
        for t in range(N(keys.size)):
            c = cell_of(keys[t], salts[i], i, partition)
            cells[c] = np.int32(cells[c] + symbols[t])


@compiled
def _decode(words, cells, seed, hashes, partition, n, group, step, divisor, out, residual):
    """Decode sums of sketches. It is one call from Python, because a step calls it for every unit.

    Args:
        words: ``[words]`` uint32, the bitmap of the present groups.
        cells: ``[cells]`` int32, the sums, which may become the remaining sums.
        seed: int32.
        hashes, partition: as for :func:`_insert`.
        n: elements.
        group: a tuple of as many entries as a symbol has lanes.
        step, divisor: float32.
        out: ``[n]``, as :func:`store` takes it.
        residual: ``[n]``, updated, or None.

    Returns:
        The numbers of groups present, and of groups not recovered.
    """
    keys, stuck = keys_of(words), 0
    if hashes == 0:
        values = cells[keys]
    else:
        salts = salts_of(seed, hashes)
        values, done, degree = recover(keys, salts, partition, cells)
        stuck = keys.size - np.count_nonzero(done)
        if stuck and residual is not None:
            _estimate(keys, done, degree, salts, partition, cells, n, group, step, residual)
    for j in range(N(n)):
        store(out, j, F(0.0))
    lanes = len(group)
    for t in range(N(keys.size)):
        first = N(keys[t]) * N(lanes)
        for lane in range(N(lanes)):
            if first + lane < N(n):
                store(out, first + lane, _lane(values[t], lane, lanes, step) / divisor)
    return keys.size, stuck


@register_jitable(inline="always")
def _lane(symbol, lane, lanes, step):
    """float32 element of lane ``lane`` of ``lanes`` of an int32 sum of symbols.

    Adding half of each lane's range undoes all borrows at once: lanes become plain digits.
    """
    bits = N(32 // lanes)
    half = N(1) << (bits - N(1))
    bias = N(0)
    for i in range(N(lanes)):
        bias |= half << (bits * i)
    digit = ((N(U(symbol)) + bias) >> (bits * N(lane))) & ((half << N(1)) - N(1))
    return F(F(np.int64(digit) - np.int64(half)) * step)


@register_jitable
def _estimate(keys, done, degree, salts, partition, cells, n, group, step, residual):
    """Add an estimate of the groups that were not recovered to the owner's residual, from the
    remaining sums ``cells`` and keys ``degree`` of their cells."""
    lanes = len(group)
    for t in range(keys.size):
        if done[t]:
            continue
        first = N(keys[t]) * N(lanes)
        for lane in range(N(lanes)):
            if first + lane < N(n):
                share = F(0.0)
                for i in range(salts.size):
                    c = cell_of(keys[t], salts[i], i, partition)
                    share += _lane(cells[c], lane, lanes, step) / F(degree[c])
                share /= F(salts.size)
                at = first + lane
                store_finite(residual, at, load(residual, at) + share)

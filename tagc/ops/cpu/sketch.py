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
    fmix32,
    group_of,
    load,
    numpy_of,
    store,
    store_finite,
    widened,
    words_of,
)
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
        salts = _salts_of(seed.numpy()[0], layout.hashes)
        values, done, _ = _recover(keys, salts, layout.partition, cells.numpy().copy())
        symbols.numpy()[keys], stuck.numpy()[keys] = values, done == 0
    return symbols, stuck


@register_jitable(inline="always")
def _cell_of(key, salt, i, partition):
    """The cell of a key in partition ``i``, whose salt this is."""
    return N(i) * N(partition) + ((N(fmix32(U(key ^ salt))) * N(partition)) >> N(32))


@compiled
def _salts_of(seed, hashes):
    """One salt for each hash of a key: ``[hashes]`` uint32 from an int32 seed."""
    salts = np.empty(hashes, np.uint32)
    for i in range(hashes):
        salts[i] = fmix32(U(U(seed) * U(0x9E3779B9) + U(U(i + 1) * U(0x7F4A7C15))))
    return salts


@compiled
def _recover(keys, salts, partition, cells):
    """Peel the cells of the present groups, with a queue of the cells that have one key left.

    Example: keys A in cells 0 and 3, B in 0 and 4. Cell 3 has A alone, so its sum is the symbol of
    A; without A, cell 0 has B alone.

    ``slots[c]`` is the sum of the places in ``keys`` of the keys that are left in cell ``c``: if
    one is left, it is that one.

    Args:
        keys: ``[count]`` uint32: the present groups.
        salts: ``[hashes]`` uint32.
        partition: cells of a partition.
        cells: ``[cells]`` int32, the sums, which become the remaining sums.

    Returns:
        ``[count]`` int32, the symbols by key, 0 where not recovered; ``[count]`` uint8, 1 where
        recovered; ``[cells]`` int32, the number of keys left in each cell.
    """
    values, done = np.zeros(keys.size, np.int32), np.zeros(keys.size, np.uint8)
    degree, slots = np.zeros(cells.size, np.int32), np.zeros(cells.size, np.uint32)
    for i in range(salts.size):
        for t in range(N(keys.size)):
            c = _cell_of(keys[t], salts[i], i, partition)
            degree[c] += np.int32(1)
            slots[c] = U(slots[c] + U(t))
    # A cell enters the queue once, when its degree falls to one.
    queue = np.empty(cells.size, np.uint32)
    head, tail = N(0), N(0)
    for c in range(N(cells.size)):
        if degree[c] == 1:
            queue[tail] = c
            tail += N(1)
    while head < tail:
        found = queue[head]
        head += N(1)
        if degree[found] != 1:  # its key was found in another cell
            continue
        slot, value = N(slots[found]), cells[found]
        values[slot], done[slot] = value, 1
        for i in range(salts.size):
            c = _cell_of(keys[slot], salts[i], i, partition)
            cells[c] = np.int32(cells[c] - value)
            slots[c] = U(slots[c] - U(slot))
            degree[c] -= np.int32(1)
            if degree[c] == 1:
                queue[tail] = c
                tail += N(1)
    return values, done, degree


@compiled
def _insert(keys, symbols, seed, hashes, partition, cells):
    """Sketch symbols.

    Args:
        keys, symbols: ``[count]`` uint32 and int32; keys are all different.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        cells: ``[cells]`` int32, written.
    """
    cells[:] = 0
    salts = _salts_of(seed, hashes)
    if hashes == 0:
        for t in range(N(keys.size)):
            cells[keys[t]] = symbols[t]
    for i in range(hashes):
        for t in range(N(keys.size)):
            c = _cell_of(keys[t], salts[i], i, partition)
            cells[c] = np.int32(cells[c] + symbols[t])


@compiled
def _decode(words, cells, seed, hashes, partition, n, group, step, divisor, out, residual):
    """Decode sums of sketches. It is one call from Python, because a step calls it for every unit.

    Args:
        words: ``[words]`` uint32, the bitmap of the present groups.
        cells: ``[cells]`` int32, the sums, which may become the remaining sums.
        hashes, partition: as for :func:`_insert`.
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
        salts = _salts_of(seed, hashes)
        values, done, degree = _recover(keys, salts, partition, cells)
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
                    c = _cell_of(keys[t], salts[i], i, partition)
                    share += _lane(cells[c], lane, lanes, step) / F(degree[c])
                share /= F(salts.size)
                at = first + lane
                store_finite(residual, at, load(residual, at) + share)

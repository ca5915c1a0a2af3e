"""Decode on a CPU: list the groups, peel, and write the shard front to back."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from tagc.ops.cpu.kernels.bitmap import keys_of
from tagc.ops.cpu.kernels.output import TILE, write_tile
from tagc.ops.cpu.kernels.peeler import recover
from tagc.ops.cpu.kernels.scalar import N, compiled, lane_of, load, salts_of, store_finite


@compiled
def decode_shard(index, cells, n, group, step, seed, divisor, hashes, partition, out, residual):
    """Decode, see :meth:`tagc.ops.sketch.SketchOps.decode`.

    Args:
        index: ``[words + 1]`` uint32, the OR of the ranks' bitmaps and of their poison words.
        cells: ``[cells]`` int32 or float32, the sums; become what peeling leaves in them.
        n: elements.
        group: a tuple of as many entries as a symbol has lanes.
        step: float32.
        seed: int32.
        divisor: float32.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
        residual: ``[n]`` likewise, updated; or None.

    Returns:
        How many groups are present, and how many of them could not be recovered.
    """
    poison, words = index[index.size - 1], index[: index.size - 1]
    keys = keys_of(words)
    stuck = 0
    if hashes == 0:
        values = cells[keys]
    else:
        salts = salts_of(seed, hashes)
        values, done, where, degree = recover(keys, salts, partition, cells)
        stuck = keys.size - np.sum(done)
        if stuck and residual is not None:
            _estimate(keys, done, where, degree, cells, n, len(group), step, hashes, residual)
    if poison:
        # A bfloat16 output is an integer array here: 0x7fc0 is its NaN.
        _fill_nan(out)
    else:
        _write(values, keys, n, group, step, divisor, out)
    return keys.size, stuck


def _fill_nan(out):
    """Fill ``out``, ``[n]`` float32 or the bits of bfloat16 as uint16, with NaN."""
    raise NotImplementedError


@overload(_fill_nan)
def _(out):
    if out.dtype == types.uint16:

        def fill_bits(out):
            out[:] = np.uint16(0x7FC0)

        return fill_bits

    def fill(out):
        out[:] = np.nan

    return fill


@compiled
def peel_shard(cells, words, seed, hashes, partition, symbols, stuck):
    """Recover symbols, see :meth:`tagc.ops.sketch.SketchOps.peel`.

    Args:
        cells: ``[cells]`` int32 or float32, the sums.
        words: ``[words]`` uint32, the bitmap of the present groups.
        seed: int32.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        symbols: ``[groups]`` of the dtype of ``cells``, written.
        stuck: ``[groups]`` bool, written: which groups could not be recovered.
    """
    keys = keys_of(words)
    symbols[:] = 0
    stuck[:] = False
    if hashes == 0:
        for key in keys:
            symbols[key] = cells[key]
        return
    values, done, _, _ = recover(keys, salts_of(seed, hashes), partition, cells.copy())
    for slot in range(keys.size):
        symbols[keys[slot]] = values[slot]
        stuck[keys[slot]] = done[slot] == 0


@compiled
def _write(values, keys, n, group, step, divisor, out):
    """Dequantize into the output, a tile at a time.

    Args:
        values: ``[count]`` int32 or float32, the symbols by key.
        keys: ``[count]`` uint32, ascending.
        n: elements.
        group: a tuple of as many entries as a symbol has lanes.
        step, divisor: float32.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
    """
    lanes = len(group)
    sums, t = np.zeros(TILE, np.float32), N(0)
    for base in range(N(0), N(n), N(TILE)):
        end = base + N(TILE)
        while t < N(keys.size):
            at = N(keys[t]) * N(lanes)
            if at >= end:
                break
            for lane in range(lanes):
                sums[at - base + N(lane)] = _dequantize(values[t], lane, lanes, step) / divisor
            t += N(1)
        write_tile(sums, min(N(TILE), N(n) - base), np.float32(1.0), out, base)


def _dequantize(v, lane, lanes, step):
    """float32 element of lane ``lane`` of ``lanes`` of a symbol, int32 or float32."""
    raise NotImplementedError


@overload(_dequantize, inline="always")
def _(v, lane, lanes, step):
    if v == types.float32:
        return lambda v, lane, lanes, step: v
    return lambda v, lane, lanes, step: np.float32(np.float32(lane_of(v, lane, lanes)) * step)


@compiled
def _estimate(keys, done, where, degree, cells, n, lanes, step, hashes, residual):
    """Give the owner's residual an estimate of what could not be peeled.

    Args:
        keys: ``[count]`` uint32, ascending.
        done: ``[count]`` uint8, 1 where recovered.
        where: ``[count * hashes]`` uint32, the cells of each key.
        degree: ``[cells]`` int32, keys left in each cell.
        cells: ``[cells]`` int32 or float32, what is left in them.
        n: elements.
        lanes: elements of a group.
        step: float32.
        hashes: cells of a key.
        residual: ``[n]`` float32 or the bits of bfloat16 as uint16, updated.
    """
    for slot in range(keys.size):
        if done[slot]:
            continue
        lo = np.int64(keys[slot]) * lanes
        for lane in range(min(lanes, n - lo)):
            share = np.float32(0.0)
            for i in range(hashes):
                p = where[slot * hashes + i]
                share += _dequantize(cells[p], lane, lanes, step) / np.float32(degree[p])
            share /= np.float32(hashes)
            store_finite(residual, lo + lane, load(residual, lo + lane) + share)

"""The last steps of decoding on a CPU: the shard is written front to back, and the residual gets an
estimate of what could not be recovered.

Python calls them after peeling. What depends on the dtype of the shard is compiled for each of
them, and peeling is not compiled again with it.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from tagc.ops.cpu.kernels.output import TILE, new_tile, write_tile
from tagc.ops.cpu.kernels.scalar import N, compiled, lane_of, load, store_finite


@compiled
def read_cells(keys, cells):
    """The symbols of the present groups in a direct layout: ``[count]`` of the dtype of ``cells``.

    Args:
        keys: ``[count]`` uint32: the present groups.
        cells: ``[cells]`` int32 or float32, the sums.
    """
    values = np.empty(keys.size, cells.dtype)
    for t in range(N(keys.size)):
        values[t] = cells[keys[t]]
    return values


@compiled
def write_shard(values, keys, n, group, step, divisor, out):
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
    sums, t = new_tile(TILE, out), N(0)
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
def estimate(keys, done, where, degree, cells, n, lanes, step, hashes, residual):
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

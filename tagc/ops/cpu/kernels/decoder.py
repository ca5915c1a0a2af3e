"""Decoding on a CPU: lists the groups, peels them, writes the shard front to back, and adds an
estimate of unrecovered groups to the residual.

It is one call from Python. Between training steps, Python's own code falls out of the caches: three
calls, each of which converts a few tensors to arrays, took as long as peeling 13,000 keys.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from tagc.ops.cpu.kernels.bitmap import keys_of
from tagc.ops.cpu.kernels.output import TILE, new_tile, write_tile
from tagc.ops.cpu.kernels.peeler import recover
from tagc.ops.cpu.kernels.scalar import N, compiled, lane_of, load, store_finite


@compiled
def decode_shard(
    index, cells, seed, hashes, partition, n, group, step, divisor, out, residual, stats,
):  # fmt: skip
    """Decode sums of sketches, see :meth:`tagc.ops.sketch.SketchOps.decode`.

    Args:
        index: ``[index_words]`` int32, the bitmap of the present groups, then the poison word.
        cells: ``[cells]`` int32, the sums; may be overwritten.
        seed: ``[1]`` int32.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        n: elements.
        group: a tuple of as many entries as a symbol has lanes.
        step: ``[1]`` float32.
        divisor: the number of ranks.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written if the index is not
            poisoned.
        residual: ``[n]`` float32 or the bits of bfloat16 as uint16, updated; or None.
        stats: ``[2]`` int32, written: groups present, and groups not recovered.

    Returns:
        Whether the index is poisoned.
    """
    words = index.view(np.uint32)
    keys, stuck = keys_of(words[:-1]), 0
    if hashes:
        values, done, where, degree = recover(keys, seed[0], hashes, partition, cells)
        stuck = keys.size - np.count_nonzero(done)
        if stuck and residual is not None:
            estimate(keys, done, where, degree, cells, n, len(group), step[0], hashes, residual)
    else:
        values = read_cells(keys, cells)
    stats[0], stats[1] = keys.size, stuck
    if words[-1]:
        return True
    write_shard(values, keys, n, group, step[0], np.float32(divisor), out)
    return False


@compiled
def read_cells(keys, cells):
    """The symbols of the present groups in a direct layout: ``[count]`` int32.

    Args:
        keys: ``[count]`` uint32: the present groups.
        cells: ``[cells]`` int32, the sums.
    """
    values = np.empty(keys.size, np.int32)
    for t in range(N(keys.size)):
        values[t] = cells[keys[t]]
    return values


@compiled
def write_shard(values, keys, n, group, step, divisor, out):
    """Dequantize into the output, a tile at a time.

    Args:
        values: ``[count]`` int32, the symbols by key.
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
        write_tile(sums, min(N(TILE), N(n) - base), np.float32(1.0), False, out, base)


@register_jitable(inline="always")
def _dequantize(v, lane, lanes, step):
    """float32 element of lane ``lane`` of ``lanes`` of an int32 symbol."""
    return np.float32(np.float32(lane_of(v, lane, lanes)) * step)


@compiled
def estimate(keys, done, where, degree, cells, n, lanes, step, hashes, residual):
    """Add an estimate of the unrecovered groups to the owner's residual.

    Args:
        keys: ``[count]`` uint32, ascending.
        done: ``[count]`` uint8, 1 where recovered.
        where: ``[count * hashes]`` uint32, the cells of each key.
        degree: ``[cells]`` int32, keys left in each cell.
        cells: ``[cells]`` int32, the remaining sums.
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

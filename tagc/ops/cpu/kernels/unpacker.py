"""Unpacking: adds up sparse messages one tile of the shard at a time, without listing all keys.

For every message there is a chunk of keys and their elements, which stay in the caches with the
tile. When a tile needs more of them, the next chunk is read.

Example: with tiles of 8 groups, a message with the groups 3, 9 and 10 adds its first group to the
first tile and stops at 9; the second tile continues there.
"""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.bitmap import SLACK, count_bits, is_dense, list_groups
from tagc.ops.cpu.kernels.llvm import (
    add_four,
    add_one,
    add_two,
    mask_outside,
    put_keys,
    shift_left,
    shift_right,
    trailing_zeros,
)
from tagc.ops.cpu.kernels.output import TILE, new_tile, write_tile
from tagc.ops.cpu.kernels.quantizer import dequantize_block, scale_at
from tagc.ops.cpu.kernels.scalar import N, U, compiled
from tagc.ops.packed import POISON

# Elements of a message to read at a time, a power of two; more for large blocks.
_CHUNK = 1024
# State of a message: number of groups, of groups added and of groups read; number of bitmap words
# listed, of places found in them and not yet read; whether the bitmap is dense; the last key.
_COUNT, _ADDED, _READ, _WORDS, _FOUND, _DENSE, _LAST = range(7)


@compiled
def _read_keys(places, words, low, first, count, low_bits, most, last, keys, k):
    """Assemble keys, see :mod:`tagc.ops.packed`.

    Even for arbitrary words, keys lie in ascending tiles if a tile has a multiple of ``2**8``
    groups: high parts ascend because places do, and with 16 low bits keys are forced to ascend.

    Args:
        places: ``[count]`` uint32, or 8 longer, places of the set bits of the index's bitmap.
        words: ``[...]`` uint32, from ``low`` on the low parts of Elias-Fano.
        first: uint64, number of keys before these; a multiple of 32.
        count: uint64, number of keys to read.
        low_bits: bits of a low part; 0 for a bitmap.
        most: uint32, the largest possible high part.
        last: uint32, the key before the first.
        keys: ``[...]`` uint32, written from ``k`` on, up to 8 more than ``count``.

    Returns:
        uint32: with 16 low bits the last key, otherwise ``last``.
    """
    width, before = U(low_bits), U(first)
    if low_bits == 0:
        for i in range(count):
            keys[k + i] = places[i]
    elif low_bits == 16:
        parts, at = words.view(np.uint16), N(2) * low + first
        for i in range(count):
            high = min(U(places[i] - U(before + U(i))), most)
            last = max(last, U(shift_left(high, width) | U(parts[at + i])))
            keys[k + i] = last
    elif low_bits == 8:
        quarters, at = words.view(np.uint8), N(4) * low + first
        for i in range(count):
            high = U(places[i] - U(before + U(i)))
            high = high if high < most else most
            keys[k + i] = U(shift_left(high, width) | U(quarters[at + i]))
    else:
        for i in range(N(0), count, N(8)):
            at = (first + i) * N(width)
            part = shift_right(words[low + (at >> N(5))], U(at & N(31)))
            put_keys(keys, k + i, places, i, U(before + U(i)), part, width, most)
    return last


@compiled
def _read_chunk(
    messages, scales, codes, low, high, high_words, low_bits, most, block, group, size,
    chunk, places, keys, k, values, state,
):  # fmt: skip
    """Read the next chunk of a message.

    Args:
        scales, codes: start of the message's scales and codes in ``messages``.
        low, high: start of its low parts and of its bitmap in ``messages``.
        size: uint64, elements of a group.
        chunk: uint64, number of groups to read.
        places: ``[2 * chunk + SLACK]`` uint32, the places not yet read, then scratch.
        keys: ``[...]`` uint32, written from ``k`` on.
        values: ``[...]`` float32, written from ``k * size`` on.
        state: ``[7]`` uint64, the message's state, updated.
    """
    t, dense = state[_READ], state[_DENSE] != N(0)
    w, found = list_groups(
        messages, high, state[_WORDS], N(high_words), dense, places, N(0), state[_FOUND], chunk
    )
    count = min(chunk, state[_COUNT] - t)
    last = U(state[_LAST])
    state[_LAST] = _read_keys(places, messages, low, t, count, low_bits, most, last, keys, k)
    for i in range(found - count):
        places[i] = places[i + count]
    state[_READ], state[_WORDS], state[_FOUND] = t + count, w, found - count
    words, first = N(block // len(group)), t * size // N(block)
    for b in range((count * size + N(block) - N(1)) // N(block)):
        s, at = scale_at(messages, scales, first + b), codes + (first + b) * words
        dequantize_block(messages, at, words, group, s, values, k * size + b * N(block))


@compiled
def unpack_shard(
    messages, stride, ranks, scales, codes, n, lanes, low, high, high_words, low_bits, capacity,
    block, group, divisor, out,
):  # fmt: skip
    """Add up sparse messages, see :meth:`tagc.ops.packed.PackedOps.unpack`.

    Args:
        messages: ``[...]`` uint32, in which the messages begin ``stride`` words apart.
        stride: words from one message to the next.
        ranks: number of messages.
        scales, codes: start of scales and codes in a message, in words.
        n: elements.
        lanes: elements of a group.
        low: start of the low parts in a message, in words.
        high: start of the bitmap, which follows them.
        high_words: words of the bitmap.
        low_bits: bits of a low part; 0 for a bitmap of the groups.
        capacity: number of groups that fit in a message; further groups of an index are left out.
        block: elements of a block.
        group: a tuple of as many entries as a word has codes.
        divisor: float32.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written if no message is poisoned.

    Returns:
        Whether a message is poisoned.
    """
    for r in range(N(ranks)):
        if messages[r * N(stride) + N(POISON)]:
            return True
    size = N(lanes)
    chunk = max(N(_CHUNK), N(block)) // size
    room, groups = chunk + N(32), N(TILE) // size
    most = shift_right(U((N(n) + size - N(1)) // size), U(low_bits))
    # One row for every message.
    places = np.empty((ranks, 2 * chunk + SLACK), np.uint32)
    keys = np.empty(N(ranks) * room, np.uint32)
    values = np.empty(N(ranks) * room * size, np.float32)
    state = np.zeros((ranks, 7), np.uint64)
    for r in range(N(ranks)):
        at = r * N(stride) + N(high)
        bits = count_bits(messages[at : at + N(high_words)])
        state[r, _COUNT] = min(N(bits), N(capacity))
        state[r, _DENSE] = N(is_dense(high_words, bits))
    sums = new_tile(TILE, out)
    for base in range(N(0), N(n), N(TILE)):
        start = base // size
        for r in range(N(ranks)):
            t, k = state[r, _ADDED], r * room
            while t < state[r, _COUNT]:
                if t == state[r, _READ]:
                    message = r * N(stride)
                    _read_chunk(
                        messages, message + N(scales), message + N(codes), message + N(low),
                        message + N(high), high_words, low_bits, most, block, group, size, chunk,
                        places[r], keys, k, values, state[r],
                    )  # fmt: skip
                first = k + (t & (chunk - N(1)))
                stop = first + state[r, _READ] - t
                end = first
                while end + N(32) <= stop and N(keys[end + N(31)]) - start < groups:
                    end += N(32)
                if end < stop:
                    away = mask_outside(keys, end, U(start), U(groups))
                    end = min(stop, end + N(trailing_zeros(away)))
                if size == N(1):
                    for i in range(first, end):
                        add_one(sums, start, N(keys[i]), values, i)
                elif size == N(2):
                    for i in range(first, end):
                        add_two(sums, base, N(2) * N(keys[i]), values, N(2) * i)
                else:
                    for i in range(first, end):
                        add_four(sums, base, N(4) * N(keys[i]), values, N(4) * i)
                t += end - first
                if end < stop:
                    break
            state[r, _ADDED] = t
        write_tile(sums, min(N(TILE), N(n) - base), divisor, False, out, base)
    return False

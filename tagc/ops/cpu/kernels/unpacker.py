"""Unpacking: sparse messages are added up a tile of the shard at a time, nothing is listed whole.

For every message there is a chunk of keys and of their elements, which stay in the caches with the
tile. They are read on when a tile needs more of them.

Example: with tiles of 8 groups, a message with the groups 3, 9 and 10 adds its first element to the
first tile and stops at 9; the second tile goes on there.
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

# Elements of a message that are read at a time, a power of two; more for large blocks.
_CHUNK = 1024
# Of a message: groups in all, added so far, and read so far; words of the bitmap that were listed,
# places found in them that are not read yet, whether the bitmap is dense, and the last key.
_COUNT, _ADDED, _READ, _WORDS, _FOUND, _DENSE, _LAST = range(7)


@compiled
def _read_keys(places, words, low, first, count, low_bits, most, last, keys, k):
    """Put keys together, see :mod:`tagc.ops.packed`.

    Keys of any words lie in tiles that follow one another, if the groups of a tile are a multiple
    of ``2**8``: high parts ascend, since places do; and with 16 low bits keys are made to.

    Args:
        places: ``[count]`` uint32, or 8 longer, places of the set bits of the index's bitmap.
        words: ``[...]`` uint32, from ``low`` on the low parts of Elias-Fano.
        first: uint64, how many keys come before; a multiple of 32.
        count: uint64, keys to read.
        low_bits: bits of a low part; 0 for a bitmap.
        most: uint32, the largest high part that there can be.
        last: uint32, the key before the first.
        keys: ``[...]`` uint32, written from ``k`` on, up to 8 more than ``count``.

    Returns:
        uint32, the last key with 16 low bits, ``last`` with others.
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
        scales, codes: where the message's scales and codes begin in ``messages``.
        low, high: where its low parts and its bitmap begin in ``messages``.
        size: uint64, elements of a group.
        chunk: uint64, groups to read.
        places: ``[2 * chunk + SLACK]`` uint32, those that wait, then scratch.
        keys: ``[...]`` uint32, written from ``k`` on.
        values: ``[...]`` float32, written from ``k * size`` on.
        state: ``[7]`` uint64, of the message, updated.
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
        stride: from one message to the next, in words.
        ranks: number of messages.
        scales, codes: where scales and codes begin in a message, in words.
        n: elements.
        lanes: elements of a group.
        low: where the low parts begin in a message, in words.
        high: where the bitmap begins, which follows them.
        high_words: words of the bitmap.
        low_bits: bits of a low part; 0 for a bitmap of the groups.
        capacity: groups that a message has room for; more of an index are left out.
        block: elements of a block.
        group: a tuple of as many entries as a word has codes.
        divisor: float32.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written if no message is poisoned.

    Returns:
        Whether one is.
    """
    for r in range(N(ranks)):
        if messages[r * N(stride) + N(POISON)]:
            return True
    size = N(lanes)
    chunk = max(N(_CHUNK), N(block)) // size
    room, groups = chunk + N(32), N(TILE) // size
    most = shift_right(U((N(n) + size - N(1)) // size), U(low_bits))
    # A piece of each for every message.
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
        write_tile(sums, min(N(TILE), N(n) - base), divisor, out, base)
    return False

"""The operators of exact changes. A block's elements are in scratch arrays that stay in the L1
cache.

Loops over elements do not branch: what needs more than level 1 is first collected in a list.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable
from torch import Tensor

from tagc.ops.cpu.arrays import N, U, bits16, compiled, words_of
from tagc.ops.exact import CLASSES, MANTISSA, ExactLayout

S, H, B = np.int16, np.uint16, np.uint8
_BINS = CLASSES * 32


def measure_exact(new: Tensor, old: Tensor, plan: Tensor, *, layout: ExactLayout) -> None:
    _measure(
        bits16(new[0]), bits16(old[0]), np.array(layout.spans, np.int64), layout.block,
        MANTISSA[layout.dtype], layout.words, plan[0].numpy(),
    )  # fmt: skip


def encode_exact(
    new: Tensor, old: Tensor, plan: Tensor, message: Tensor, *, layout: ExactLayout
) -> None:
    total, row = int(plan[0, 0]), bits16(new[0])
    words = words_of(message[0, :total])
    words[-1] = 0
    words[0] = total
    if total == layout.words:
        words[1:].view(H)[: layout.numel] = row
    elif total > 1:
        table, starts = np.split(plan[0, 1:].numpy(), [layout.tables])
        masks = np.packbits(table > 0, bitorder="little").view(U)
        sizes = np.diff(starts, append=total)
        head = np.concatenate((masks, _packed(table[table > 0], B), _packed(sizes, H)))
        words[1 : 1 + head.size] = head
        _encode(
            row, bits16(old[0]), np.array(layout.spans, np.int64), layout.block,
            MANTISSA[layout.dtype], table, starts, sizes, words,
        )  # fmt: skip


def _packed(numbers: np.ndarray, dtype: type[B] | type[H]) -> np.ndarray:
    """Numbers in words, the first in the lowest bits."""
    lanes = 4 // np.dtype(dtype).itemsize
    padded = np.zeros(-(-numbers.size // lanes) * lanes, dtype)
    padded[: numbers.size] = numbers
    return padded.view(U)


def decode_exact(message: Tensor, rows: Tensor, *, layout: ExactLayout) -> None:
    spans = np.array(layout.spans, np.int64)
    for words, row in zip(map(words_of, message), map(bits16, rows), strict=True):
        if words[0] == layout.words:
            there = words[1:].view(H)[: layout.numel]
            row[: there.size] = there
        elif 1 < words[0] < layout.words:
            head = _head_of(words, layout)
            _decode(words, row, spans, layout.block, MANTISSA[layout.dtype], *head)


def _head_of(words: np.ndarray, layout: ExactLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table of widths ``[tables]``, and the starts and sizes ``[blocks]`` of a message's
    blocks. What a damaged message lacks is zeros."""
    spans, blocks = len(layout.spans), layout.blocks
    head = np.zeros(1 + spans + layout.tables // 4 + (blocks + 1) // 2, U)
    there = min(head.size, words.size)
    head[:there] = words[:there]
    given = np.unpackbits(head[1 : 1 + spans].view(B), bitorder="little") > 0
    table, entries = np.zeros(layout.tables, np.int32), int(given.sum())
    table[given] = head[1 + spans :].view(B)[:entries]
    at = 1 + spans + (entries + 3) // 4
    sizes = head[at:].view(H)[:blocks].astype(np.int64)
    return table, at + (blocks + 1) // 2 + sizes.cumsum() - sizes, sizes


@register_jitable(inline="always")
def _ordered(k):
    """The number in order of a bit pattern, and back; int16."""
    return S(k ^ S(S(k >> S(15)) & S(0x7FFF)))


@register_jitable
def _changes(new, old, first, fill, mantissa, z, classes):
    """``z`` and the classes, within a span, of a block's elements; both uint16."""
    for j in range(fill):
        a, b = S(old[first + j]), S(new[first + j])
        q = S(_ordered(b) - _ordered(a))
        z[j] = H(S(S(q << S(1)) ^ S(q >> S(15))))
        classes[j] = H(H(H(a) >> mantissa) & H(31))


@register_jitable
def _keys(new, old, first, fill, mantissa, z, keys):
    """``32 * class + length`` of a block's elements, where ``z + 1`` has ``length`` bits."""
    _changes(new, old, first, fill, mantissa, z, keys)
    for j in range(fill):
        exponent = np.float32(np.int32(z[j]) + np.int32(1)).view(np.int32) >> np.int32(23)
        keys[j] = H(H(keys[j] << H(5)) | H(exponent - np.int32(126)))


@register_jitable(inline="always")
def _length(x):
    """Number of bits of a positive number below 2**53, uint64."""
    return N(np.float64(np.int64(x)).view(np.int64) >> 52) - N(1022)


@register_jitable
def _lower_bits(n, fill):
    """Lower bits of each of ``n`` places of a block, and the bits of all upper parts."""
    if n == 0:
        return N(0), N(0)
    low = _length(fill // n) - N(1)
    return low, n + ((fill - N(1)) >> low)


@register_jitable
def _table(counts, table):
    """Choose a span's widths; see :func:`tagc.ops.reference.measure_exact`. Returns the number
    of classes that have any.

    Args:
        counts: ``[32, 32]`` numbers of elements, by class and length.
        table: ``[32]`` int32, written.
    """
    given = 0
    above = np.empty(16, np.int64)
    for c in range(32):
        number = np.int64(0)
        for length in range(1, 18):
            number += counts[c, length]
        left = number
        for b in range(1, 16):
            left -= counts[c, b]
            above[b] = left
        above[0] = above[1]
        best = 0
        if above[1]:
            fits = np.int64(_length(N(number // above[1]))) - 1
            least = np.int64(-1)
            for b1 in range(16):
                first = number * b1 if b1 else above[1] * (fits + 1) + (number >> fits)
                for b2 in range(16):
                    bits = first + above[b1] * b2 + 16 * above[max(b1, b2)]
                    entry = b1 | b2 << 4
                    if least < 0 or bits < least or (bits == least and entry < best):
                        least, best = bits, entry
        table[c] = best
        given += best > 0
    return given


@compiled
def _measure(new, old, spans, block, mantissa, most, plan):
    """See :func:`tagc.ops.reference.measure_exact`.

    Args:
        new, old: ``[numel]`` uint16.
        most: words of a raw message.
        plan: ``[plan_words]`` int32, written.
    """
    z, keys = np.empty(block, H), np.empty(block, H)
    # Neighbours are counted apart, because the next count would wait for this one.
    counts = np.empty((4, _BINS), np.uint32)
    costs = np.empty(_BINS, N)
    at = N(1 + 32 * spans.size)
    base, given, changed, blocks, total = N(0), 0, False, N(0), N(0)
    size, shift = N(block), H(mantissa)
    for s in range(spans.size):
        end = base + N(spans[s])
        counts[:] = U(0)
        first = base
        while first < end:
            fill = min(size, end - first)
            _keys(new, old, first, fill, shift, z, keys)
            four = fill & ~N(3)
            for j in range(N(0), four, N(4)):
                counts[0, keys[j]] += U(1)
                counts[1, keys[j + N(1)]] += U(1)
                counts[2, keys[j + N(2)]] += U(1)
                counts[3, keys[j + N(3)]] += U(1)
            for j in range(four, fill):
                counts[0, keys[j]] += U(1)
            first += size
        for i in range(_BINS):
            counts[0, i] += U(U(counts[1, i] + counts[2, i]) + counts[3, i])
            changed |= counts[0, i] > 0 and i & 31 > 1
        table = plan[1 + 32 * s :][:32]
        given += _table(counts[0].reshape(32, 32), table)
        # Of an element: bits, from bit 0; whether it is listed, from 32; not listed, from 48.
        for c in range(32):
            b1, b2 = N(table[c] & 15), N(table[c] >> 4)
            for length in range(N(0), N(32)):
                escaped = (
                    (b2 + (N(16) if length > b2 else N(0))) if length > max(b1, N(1)) else N(0)
                )
                listed = N(b1 == 0 and length > 1)
                costs[N(c) << N(5) | length] = (
                    b1 + escaped + (listed << N(32)) + (N(b1 > 0) << N(48))
                )
        first = base
        while first < end:
            fill = min(size, end - first)
            _keys(new, old, first, fill, shift, z, keys)
            sums = N(0)
            for j in range(fill):
                sums += costs[keys[j]]
            bits, n, dense = sums & N(0xFFFFFFFF), sums >> N(32) & N(0xFFFF), sums >> N(48)
            if dense < fill and bits + n > N(0):
                low, upper = _lower_bits(n, fill)
                bits += _length(fill) + upper + n * low
            plan[at + blocks] = total
            total += (bits + N(31)) >> N(5)
            blocks += N(1)
            first += size
        base = end
    head = N(1 + spans.size) + ((N(given) + N(3)) >> N(2)) + ((blocks + N(1)) >> N(1))
    for b in range(blocks):
        plan[at + b] += head
    plan[0] = min(head + total, N(most)) if changed else N(1)


@register_jitable
def _level(table, first):
    """Level 1 of a span's classes, uint64: bits of an element, from bit 0; whether there are none,
    bit 6; the largest number, from bit 8; the least number that is escaped, from bit 32. The last
    entry is of no class, and needs nothing."""
    for c in range(32):
        b1 = N(table[c] & 15)
        ones = (N(1) << b1) - N(1)
        first[c] = b1 | N(b1 == N(0)) << N(6) | ones << N(8) | max(ones, N(1)) << N(32)
    first[32] = N(1) << N(48)


@register_jitable(inline="always")
def _bits_of(level):
    """Bits of an element in level 1."""
    return level & N(31)


@register_jitable(inline="always")
def _ones(level):
    """The largest number in level 1."""
    return level >> N(8) & N(0xFFFF)


@register_jitable
def _put(buffer, at, value):
    """Set bits of 32-bit words that were zeros."""
    word = at >> N(5)
    both = N(value) << (at & N(31))
    buffer[word] = U(buffer[word] | U(both & N(0xFFFFFFFF)))
    buffer[word + N(1)] = U(buffer[word + N(1)] | U(both >> N(32)))


@compiled
def _encode(new, old, spans, block, mantissa, table, starts, sizes, message):
    """Write a message's blocks.

    Args:
        new, old: ``[numel]`` uint16.
        table: ``[tables]`` int32, the widths.
        starts, sizes: ``[blocks]``, words of the message before each block and of each block.
        message: ``[total]`` uint32, written.
    """
    z, classes, hits = np.empty(block, H), np.empty(block, H), np.empty(block, H)
    first = np.empty(33, N)
    buffer = np.zeros(block * 48 // 32 + 8, U)
    base, b, size, shift = N(0), N(0), N(block), H(mantissa)
    for s in range(spans.size):
        end = base + N(spans[s])
        widths = table[32 * s :][:32]
        _level(widths, first)
        begin = base
        while begin < end:
            fill = min(size, end - begin)
            start, words = N(starts[b]), N(sizes[b])
            if words:
                _changes(new, old, begin, fill, shift, z, classes)
                bits = _encode_block(z, classes, fill, first, widths, hits, buffer)
                used = (bits + N(31)) >> N(5)
                for i in range(words):
                    message[start + i] = buffer[i]
                for i in range(used + N(2)):
                    buffer[i] = U(0)
            begin += size
            b += N(1)
        base = end


@compiled
def _encode_block(z, classes, fill, first, table, hits, buffer):
    """Write a block's bits to ``buffer``, which is zeros. Returns their number."""
    acc, filled, word, found, sparse = N(0), N(0), N(0), N(0), N(0)
    if fill & N(1):
        z[fill], classes[fill] = H(0), H(32)
    # Two at a time, at most 30 bits, because each waits for the place of the last one.
    for i in range((fill + N(1)) >> N(1)):
        j = N(i) << N(1)
        x, y = N(z[j]), N(z[j + N(1)])
        a, b = first[classes[j]], first[classes[j + N(1)]]
        hits[found] = H(j)
        found += N(x >= a >> N(32))
        hits[found] = H(j + N(1))
        found += N(y >= b >> N(32))
        sparse |= (a | b) & N(64)
        acc |= (min(x, _ones(a)) | min(y, _ones(b)) << _bits_of(a)) << filled
        filled += _bits_of(a) + _bits_of(b)
        buffer[word] = U(acc & N(0xFFFFFFFF))
        full = filled >> N(5)
        word += full
        acc >>= full << N(5)
        filled &= N(31)
    buffer[word] = U(acc & N(0xFFFFFFFF))
    at = (word << N(5)) + filled
    if not found and (not sparse or at == N(0)):
        return at
    # Both kinds of escaped elements, in order.
    n, dense = N(0), N(0)
    listed = np.empty(fill, H)
    for i in range(found):
        j = hits[i]
        listed[n] = j
        hits[dense] = j
        one = first[classes[j]] >> N(6) & N(1)
        n += one
        dense += N(1) - one
    at = _put_escaped(z, classes, table, hits, dense, buffer, at)
    if not sparse or (n == N(0) and at == N(0)):
        return at
    _put(buffer, at, n)
    at += _length(fill)
    low, upper = _lower_bits(n, fill)
    lower = at + upper
    for i in range(n):
        place = N(listed[i])
        _put(buffer, at + (place >> low) + i, N(1))
        _put(buffer, lower, place & ((N(1) << low) - N(1)))
        lower += low
    return _put_escaped(z, classes, table, listed, n, buffer, lower)


@register_jitable
def _put_escaped(z, classes, table, hits, count, buffer, at):
    """Levels 2 and 3 of the elements ``hits``, of which those of level 3 are left."""
    deeper = N(0)
    for i in range(count):
        j = hits[i]
        width = N(table[classes[j]] >> 4)
        ones = (N(1) << width) - N(1)
        x = N(z[j])
        _put(buffer, at, min(x, ones))
        at += width
        hits[deeper] = j
        deeper += N(x >= ones)
    for i in range(deeper):
        _put(buffer, at, N(z[hits[i]]))
        at += N(16)
    return at


@compiled
def _decode(message, row, spans, block, mantissa, table, starts, sizes):
    """Read a message's blocks, see :func:`_encode`.

    Args:
        message: ``[capacity]`` uint32; what is missing at its end is zeros.
        row: ``[numel]`` uint16, updated in place.
    """
    capacity = N(message.size)
    z, classes, hits = np.empty(block, H), np.empty(block, H), np.empty(block, H)
    first = np.empty(33, N)
    # Each entry has two neighbouring words, so that one load has 32 bits from anywhere.
    # A damaged message may claim a list of all elements beside two levels of all.
    buffer = np.zeros(3 * block + 8, N)
    dirty = N(0)
    base, b, size, shift = N(0), N(0), N(block), H(mantissa)
    for s in range(spans.size):
        end = base + N(spans[s])
        widths = table[32 * s :][:32]
        _level(widths, first)
        begin = base
        while begin < end:
            fill = min(size, end - begin)
            start, words = N(starts[b]), N(sizes[b])
            if words:
                there = min(words, capacity - start if start < capacity else N(0))
                there = min(there, N(buffer.size) - N(2))
                for i in range(there, dirty):
                    buffer[i] = N(0)
                dirty = there
                if there:
                    for i in range(there - N(1)):
                        pair = N(message[start + i + N(1)]) << N(32)
                        buffer[i] = N(message[start + i]) | pair
                    buffer[there - N(1)] = N(message[start + there - N(1)])
                _decode_block(buffer, row, begin, fill, shift, z, classes, first, widths, hits)
            begin += size
            b += N(1)
        base = end


@register_jitable
def _get(buffer, at, width):
    """A number of at most 32 bits."""
    return (buffer[at >> N(5)] >> (at & N(31))) & ((N(1) << width) - N(1))


@compiled
def _decode_block(
    buffer, row, base, fill, mantissa, z, classes, first, table, hits
):  # fmt: skip
    for j in range(fill):
        classes[j] = H(H(row[base + j] >> mantissa) & H(31))
    at, found, sparse = N(0), N(0), N(0)
    for j in range(fill):
        c = first[classes[j]]
        x = (buffer[at >> N(5)] >> (at & N(31))) & _ones(c)
        at += _bits_of(c)
        z[j] = H(x)
        hits[found] = H(j)
        found += N(x >= c >> N(32))
        sparse |= c & N(64)
    at = _get_escaped(buffer, at, z, classes, table, hits, found)
    if sparse:
        n = min(_get(buffer, at, _length(fill)), fill)
        at += _length(fill)
        low, upper = _lower_bits(n, fill)
        lower, found = at + upper, N(0)
        for begin in range(N(0), upper, N(32)):
            some = _get(buffer, at + begin, min(upper - begin, N(32)))
            while some and found < n:
                number = begin + _length(some & (~some + N(1))) - N(1)
                place = ((number - found) << low) | _get(buffer, lower + found * low, low)
                hits[found] = H(min(place, fill - N(1)))  # if damaged
                found += N(1)
                some &= some - N(1)
        at = lower + n * low
        at = _get_escaped(buffer, at, z, classes, table, hits, found)
    for j in range(fill):
        q = S(H(H(z[j] >> H(1)) ^ H(H(0) - H(z[j] & H(1)))))
        row[base + j] = H(_ordered(S(_ordered(S(row[base + j])) + q)))


@register_jitable
def _get_escaped(buffer, at, z, classes, table, hits, count):
    """Levels 2 and 3 of the elements ``hits``, of which those of level 3 are left. Returns where
    they end."""
    deeper = N(0)
    for i in range(count):
        j = hits[i]
        width = N(table[classes[j]] >> 4)
        x = _get(buffer, at, width)
        at += width
        z[j] = H(x)
        hits[deeper] = j
        deeper += N(x == (N(1) << width) - N(1))
    for i in range(deeper):
        z[hits[i]] = H(_get(buffer, at, N(16)))
        at += N(16)
    return at

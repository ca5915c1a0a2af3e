"""The operators of exact changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.ops.exact import CLASSES, MANTISSA, ExactLayout
from tagc.ops.reference.select import packed, patterns, unpacked
from tagc.ops.symbols import wrap_int32

_MASK = 0xFFFFFFFF


def measure_exact(new: Tensor, old: Tensor, plan: Tensor, *, layout: ExactLayout) -> None:
    """Choose the widths of a row's message, and count its words.

    The widths of a class are those with the least number of bits, and of these the ones with
    the least ``b1 | b2 << 4``. With ``e(b)``, the number of its elements with ``z`` at least
    ``2**max(b, 1) - 1``, of all ``N``, they take ``e(b1) * b2 + 16 * e(max(b1, b2))`` bits, and
    in addition ``N * b1``, or for ``b1 = 0`` about ``e(1) * (l + 1) + (N >> l)``, where ``l``
    is the largest number with ``e(1) * 2**l <= N``. The widths of a class without changes are
    0 and 0.

    Args:
        new: ``[1, numel]`` in the layout's dtype.
        old: ``[1, numel]``, what the receivers know.
        plan: ``[plan_words]`` int32, written: the message's total, the number of words that
            :func:`encode_exact` writes; a table ``b1 | b2 << 4`` of the classes of each span;
            the words of the message before each block. If the total is that of a raw message,
            or 1, the rest is as if the row was coded.
    """
    z, k = _changes(new[0], old[0]), patterns(old[0])
    where = _Where.of(layout, new.device)
    table = _widths(z, where.classes(k, layout), layout)
    _, bits = _walk(z, table[where.classes(k, layout)], where, lambda field: field.value)
    words = (bits + 31) >> 5
    head = 1 + len(layout.spans) + _words(int((table > 0).sum()), 8) + _words(len(words), 16)
    total = min(head + int(words.sum()), layout.words) if bool(z.any()) else 1
    starts = head + words.cumsum(0) - words
    plan[0] = torch.cat([starts.new_tensor([total]), table, starts])


def encode_exact(
    new: Tensor, old: Tensor, plan: Tensor, message: Tensor, *, layout: ExactLayout
) -> None:
    """Write a message.

    Args:
        new, old, plan: as in :func:`measure_exact`, unchanged since.
        message: ``[1, capacity]`` int32 with at least as many words as the plan's total, of
            which so many are written.
    """
    total, coded = int(plan[0, 0]), message.new_zeros(layout.words)
    coded[0] = total
    if total == layout.words:
        coded[1:].view(torch.int16)[: layout.numel] = new[0].view(torch.int16)
    elif total > 1:
        coded = _coded_message(new[0], old[0], plan[0].to(torch.int64), layout)
    message[0, :total] = coded[:total]


def _coded_message(new: Tensor, old: Tensor, plan: Tensor, layout: ExactLayout) -> Tensor:
    """``[total]`` int32."""
    total, table, starts = plan.split([1, layout.tables, layout.blocks])
    z, where = _changes(new, old), _Where.of(layout, new.device)
    given, sizes = table > 0, torch.cat([starts, total]).diff()
    parts = packed(given.to(torch.int64), 1), packed(table[given], 8), packed(sizes, 16)
    head = torch.cat([total, *parts])
    words = head.new_zeros(int(total) + 1)

    def put(field: _Field) -> Tensor:
        at = 32 * starts[field.block] + field.at
        shifted = torch.where(field.width > 0, field.value, 0) << (at & 31)
        word = (at >> 5).clamp(max=len(words) - 2)  # of no bits
        words.index_add_(0, word, shifted & _MASK)
        words.index_add_(0, word + 1, shifted >> 32)
        return field.value

    _walk(z, table[where.classes(patterns(old), layout)], where, put)
    words[: len(head)] = head
    return wrap_int32(words[:-1])


def decode_exact(message: Tensor, rows: Tensor, *, layout: ExactLayout) -> None:
    """Turn old rows into new ones. A damaged message makes any numbers of its own row.

    Args:
        message: ``[n, capacity]`` int32.
        rows: ``[n, numel]`` in the layout's dtype, updated in place.
    """
    for words, row in zip(message, rows, strict=True):
        total = int(words[0])
        if total == layout.words:
            there = words[1 : layout.words].contiguous().view(row.dtype)[: layout.numel]
            row[: len(there)] = there
        elif 1 < total < layout.words:
            _decode_row(words.to(torch.int64) & _MASK, row, layout)


@dataclass(frozen=True)
class _Where:
    """Where elements are: constants of a layout.

    Attributes:
        span, block: by element.
        first, size: first element of each block, and the number of its elements.
    """

    span: Tensor
    block: Tensor
    first: Tensor
    size: Tensor

    @classmethod
    def of(cls, layout: ExactLayout, device: torch.device) -> _Where:
        spans = torch.tensor(layout.spans, dtype=torch.int64, device=device)
        blocks = (spans + layout.block - 1) // layout.block
        number = torch.arange(layout.blocks, device=device)
        span = torch.arange(len(spans), device=device).repeat_interleave(blocks)
        inside = (number - (blocks.cumsum(0) - blocks)[span]) * layout.block
        size = (spans[span] - inside).clamp(max=layout.block)
        return cls(
            span.repeat_interleave(size),
            number.repeat_interleave(size),
            size.cumsum(0) - size,
            size,
        )

    def classes(self, k: Tensor, layout: ExactLayout) -> Tensor:
        """Number of each element's class, from its bit pattern."""
        exponent = k >> MANTISSA[layout.dtype]
        return self.span * CLASSES + exponent % CLASSES

    def sums(self, x: Tensor) -> Tensor:
        """Sums of elements' numbers, by block."""
        return x.new_zeros(len(self.size)).index_add_(0, self.block, x)

    def before(self, x: Tensor) -> Tensor:
        """The sum of the numbers of all elements of the same block before each element."""
        sums = x.cumsum(0) - x
        return sums - sums[self.first[self.block]]


def _ordered(k: Tensor) -> Tensor:
    """Numbers in order to bit patterns, and back, modulo 2**16."""
    return torch.where(k >= 0x8000, k ^ 0x7FFF, k)


def _changes(new: Tensor, old: Tensor) -> Tensor:
    """``z``."""
    q = (_ordered(patterns(new)) - _ordered(patterns(old))) & 0xFFFF
    return torch.where(q < 0x8000, 2 * q, 2 * (0x10000 - q) - 1)


def _length(x: Tensor) -> Tensor:
    """Number of bits of integers."""
    return x.double().frexp().exponent.to(torch.int64)


def _widths(z: Tensor, classes: Tensor, layout: ExactLayout) -> Tensor:
    """The table of all classes ``[tables]``; see :func:`tagc.ops.reference.measure_exact`."""
    bins = 18  # z + 1 has 1 to 17 bits
    counts = torch.bincount(classes * bins + _length(z + 1), minlength=layout.tables * bins)
    counts = counts.view(layout.tables, bins)
    # Elements with z >= 2**b - 1.
    above = counts.sum(-1, keepdim=True) - counts.cumsum(-1)
    number, changed = counts.sum(-1), above[:, 1]
    l = _length(number // changed.clamp(min=1)) - 1  # noqa: E741
    listed = torch.where(changed > 0, changed * (l + 1) + (number >> l.clamp(min=0)), 0)
    entries = torch.arange(256, device=z.device)
    b1, b2 = entries & 15, entries >> 4
    first = torch.where(b1 > 0, number[:, None] * b1, listed[:, None])
    once, twice = above[:, b1.clamp(min=1)], above[:, torch.maximum(b1, b2).clamp(min=1)]
    return ((first + once * b2 + 16 * twice) * 256 + entries).amin(-1) & 255


@dataclass(frozen=True)
class _Field:
    """Numbers of elements or of blocks, each with its width, from a bit of its block on."""

    at: Tensor
    width: Tensor
    value: Tensor
    block: Tensor


def _walk(
    z: Tensor, entry: Tensor, where: _Where, visit: Callable[[_Field], Tensor]
) -> tuple[Tensor, Tensor]:
    """Visit all numbers of all blocks, which a visitor writes and returns, or reads.

    Args:
        z: of elements; whatever it is if numbers are read.
        entry: ``b1 | b2 << 4`` of elements.

    Returns:
        ``z`` as it is after the visit; the number of bits of each block.
    """
    block, each = where.block, torch.arange(len(where.size), device=z.device)
    b1, b2 = entry & 15, entry >> 4
    ones, more = (1 << b1) - 1, (1 << b2) - 1
    found = visit(_Field(where.before(b1), b1, torch.minimum(z, ones), block))
    end = where.sums(b1)

    def escaped(which: Tensor) -> None:
        """Levels 2 and 3 of these elements."""
        nonlocal found, end
        for width, value in ((b2, torch.minimum(z, more)), (torch.full_like(b2, 16), z)):
            width = torch.where(which, width, 0)
            here = visit(_Field(end[block] + where.before(width), width, value, block))
            end = end + where.sums(width)
            found = torch.where(which, here, found)
            which = which & (found == more)

    dense = b1 > 0
    escaped(dense & (found == ones))
    changed = (~dense & (z > 0)).to(torch.int64)
    n = where.sums(changed)
    sparse = where.sums((~dense).to(torch.int64)) > 0
    width = torch.where(sparse & (end + n > 0), _length(where.size), 0)
    n = torch.minimum(visit(_Field(end, width, n, each)), where.size)
    end = end + width
    # The Elias-Fano code, with an entry for each bit of the upper part. (A reader's are from here.)
    low = _length(where.size // n.clamp(min=1)) - 1
    bits = torch.where(n > 0, n + (where.size - 1 >> low), 0)
    owner, start = each.repeat_interleave(bits), bits.cumsum(0) - bits
    number = torch.arange(len(owner), device=z.device) - start[owner]
    place = torch.arange(len(z), device=z.device) - where.first[block]
    entries = start[block] + (place >> low[block]) + where.before(changed)
    entries = torch.where(changed > 0, entries, len(owner)).clamp(max=len(owner))
    places = z.new_full((len(owner) + 1,), -1).scatter_(0, entries, place)[:-1]
    is_place = visit(_Field(end[owner] + number, torch.ones_like(owner), (places >= 0) * 1, owner))
    end = end + bits
    rank = where.size.new_zeros(len(owner) + 1)
    rank[1:] = is_place.cumsum(0)
    rank = rank[:-1] - rank[start[owner]]
    width = torch.where(is_place > 0, low[owner], 0)
    value = places & ((1 << width) - 1)
    lower = visit(_Field(end[owner] + rank * low[owner], width, value, owner))
    end = end + n * low
    place = (number - rank << low[owner]) | lower
    there = (is_place > 0) & (place < where.size[owner])
    listed = torch.zeros_like(dense)
    listed[(where.first[owner] + place)[there]] = True
    escaped(listed & ~dense)
    return found, end


def _words(count: int, width: int) -> int:
    return -(-count * width // 32)


def _decode_row(words: Tensor, row: Tensor, layout: ExactLayout) -> None:
    k, where = patterns(row), _Where.of(layout, row.device)
    spans, blocks = len(layout.spans), layout.blocks
    words = torch.nn.functional.pad(words, (0, spans + layout.tables + blocks))  # if damaged

    given = unpacked(words[1 : 1 + spans], 1, layout.tables) > 0
    entries = int(given.sum())
    table = words.new_zeros(layout.tables)
    table[given] = unpacked(words[1 + spans :][:entries], 8, entries)
    sizes = unpacked(words[1 + spans + _words(entries, 8) :][:blocks], 16, blocks)
    head = 1 + spans + _words(entries, 8) + _words(blocks, 16)
    starts = head + sizes.cumsum(0) - sizes

    def get(field: _Field) -> Tensor:
        """Bits past a block's end are zeros."""
        word, sizes_, starts_ = field.at >> 5, sizes[field.block], starts[field.block]
        both = torch.zeros_like(field.at)
        for i in (0, 1):
            index = (starts_ + word + i).clamp(max=len(words) - 1)
            both = both | (torch.where(word + i < sizes_, words[index], 0) << 32 * i)
        return both >> (field.at & 31) & ((1 << field.width) - 1)

    # Nothing of a reader depends on these numbers, but that anything may have changed.
    z, _ = _walk(torch.ones_like(k), table[where.classes(k, layout)], where, get)
    q = torch.where(z & 1 > 0, -(z + 1) // 2, z // 2)
    made = _ordered((_ordered(k) + q) & 0xFFFF)
    row.copy_(made.to(torch.int16).view(row.dtype))

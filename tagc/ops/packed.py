"""Wire format of a packed sparse vector: an index of the kept groups, then their elements.

A message is ``[header | index | values]`` of int32. Its size follows from the layout alone, so
ranks need not exchange sizes:

* **header**: the poison word (1 if any element was not finite, else 0) and the number of groups
  kept, ``K <= capacity``.
* **index**, in the smaller of two forms. *Bitmap*: bit ``g % 32`` of word ``g // 32`` for group
  ``g``. *Elias-Fano*: the kept groups ``g_0 < g_1 < ...`` are split into ``low_bits`` low bits,
  stored one after the other (``low_bits`` divides 32, so none straddles words; entry ``i`` at bit
  ``i * low_bits``), and the rest ``h_i``, stored in unary: bit ``h_i + i`` of the high bitmap is
  set. That takes ``2 + log2(1 / density)`` bits per key, within half a bit of the entropy.
* **values**: the elements of the kept groups, one group after the other, block-quantized as
  :class:`tagc.ops.blocks.BlockLayout` says (elements past the vector's end, and places past ``K``
  groups, are zeros).

Example: groups 3, 9 and 10 of 16, ``low_bits=2``: low parts 3, 1, 2, and high parts 0, 2, 2 give
the high bits 0, 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout

HEADER = 2
POISON, KEPT_GROUPS = 0, 1
GROUPS = (1, 2, 4)
_LOW_BITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Static shape of the message for one shard.

    Attributes:
        numel: number of elements of the segment in a shard.
        group: number of elements that are kept or left together, one of ``GROUPS``.
        capacity: number of groups that fit.
        low_bits: number of low bits of a key, which are stored unchanged; 0 for a bitmap.
        values: layout of the values.
    """

    numel: int
    group: int
    capacity: int
    low_bits: int
    values: BlockLayout

    @cached_property
    def groups(self) -> int:
        """Groups in the shard; the last one may be partly padding."""
        return -(-self.numel // self.group)

    @cached_property
    def bitmap_words(self) -> int:
        """Words of a bitmap over the groups, whether or not it is sent."""
        return -(-self.groups // 32)

    @cached_property
    def low_words(self) -> int:
        """Words of the low parts; 0 for a bitmap."""
        return -(-self.capacity * self.low_bits // 32)

    @cached_property
    def high_words(self) -> int:
        """Words of Elias-Fano's high bitmap, or of the bitmap."""
        if not self.low_bits:
            return self.bitmap_words
        highest = max(0, self.groups - 1) >> self.low_bits
        return -(-(self.capacity + highest) // 32)

    @cached_property
    def index_words(self) -> int:
        """Words of the index: low parts, then high bitmap (or the bitmap alone)."""
        return self.low_words + self.high_words

    @cached_property
    def words(self) -> int:
        """int32 words of a message."""
        return HEADER + self.index_words + self.values.words


def index_of(message: Tensor, layout: PackedLayout) -> Tensor:
    """The index ``[..., index_words]`` in messages ``[..., words]``."""
    return message[..., HEADER : HEADER + layout.index_words]


def values_of(message: Tensor, layout: PackedLayout) -> Tensor:
    """The values ``[..., values.words]`` in messages ``[..., words]``."""
    return message[..., HEADER + layout.index_words :]


def plan_packed(
    numel: int, *, capacity: int, group: int = 1, bits: int = 8, block: int = 256
) -> PackedLayout:
    """The smallest message for ``capacity`` groups among ``numel`` elements.

    Raises:
        ValueError: if an argument is out of range, or there are 2**31 groups or more.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    if group not in GROUPS:
        raise ValueError(f"group must be one of {GROUPS}, got {group}")
    groups = -(-numel // group)
    if groups >= 1 << 31:
        raise ValueError(f"a message holds fewer than 2**31 groups, got {groups}")
    if not 0 <= capacity <= groups:
        raise ValueError(f"capacity must be in [0, {groups}], got {capacity}")
    values = BlockLayout(numel=capacity * group, bits=bits, block=block)
    # The bitmap comes first, so it wins ties.
    return min(
        (
            PackedLayout(numel=numel, group=group, capacity=capacity, low_bits=low, values=values)
            for low in (0, *_LOW_BITS)
        ),
        key=lambda layout: layout.index_words,
    )


class PackedOps(Protocol):
    """Tensors are preallocated; outputs may hold garbage before. Rows need unit stride only in
    their last dimension; messages and indexes may be slices of wider buffers. ``R`` rows."""

    def pack(
        self,
        grad: Tensor,
        residual: Tensor | None,
        threshold: Tensor,
        message: Tensor,
        counts: Tensor,
        *,
        layout: PackedLayout,
    ) -> None:
        """Accumulate, select, and pack the kept groups of every row into its message.

        Per row with ``x = float32(grad) + float32(residual)``:

        1. A group is selected as in the sketch, if its largest ``|x|`` is at least ``threshold``.
           If more than ``capacity`` groups are selected, the largest are kept, ties to the lower
           index. A capacity for all groups selects every non-zero group.
        2. A group with a non-finite ``x`` is not kept, its residual stays as it was, and the poison
           word is set.
        3. The kept groups' ``x`` in a row, padded with zeros to ``capacity`` groups, are quantized
           in blocks as in :meth:`tagc.ops.blocks.BlockOps.quantize`. The residual keeps
           ``x - q * s``, and ``x`` of every other group, rounded to nearest even in its dtype
           (finite stays finite).

        Args:
            grad: ``[R, numel]`` float32, bfloat16 or float16.
            residual: ``[R, numel]`` float32 or bfloat16, updated in place; None for no feedback.
            threshold: ``[R]`` float32, positive.
            message: ``[R, words]`` int32, written.
            counts: ``[R, 4]`` int32, written: groups above the threshold, finite groups that are
                not all zero, groups kept, 0.
        """
        ...

    def unpack(self, message: Tensor, out: Tensor, *, layout: PackedLayout, divisor: int) -> None:
        """Add up the messages of all ranks into this rank's shard.

        Products ``q * s`` are exact in float32; they are added in float32 in the order of ``r``,
        starting from 0, divided by ``divisor`` (IEEE) and rounded to ``out``'s dtype. Groups that
        no rank sent are 0. If any poison word is set, all of ``out`` is NaN.

        Args:
            message: ``[R, words]`` int32.
            out: ``[numel]`` float32, bfloat16 or float16, written.
        """
        ...

    def select(
        self,
        x: Tensor,
        threshold: Tensor,
        bitmap: Tensor,
        counts: Tensor,
        *,
        layout: PackedLayout,
    ) -> None:
        """Mark the groups of every row that :meth:`pack` would keep, without packing them.

        Args:
            x: ``[R, numel]`` float32 or bfloat16.
            threshold: ``[R]`` float32, positive.
            bitmap: ``[R, bitmap_words]`` int32, written.
            counts: ``[R, 4]`` int32, written as by :meth:`pack`.
        """
        ...

    def write_index(self, bitmap: Tensor, index: Tensor, *, layout: PackedLayout) -> None:
        """Encode bitmaps ``[R, bitmap_words]`` of at most ``capacity`` groups as ``index``
        ``[R, index_words]``, both int32."""
        ...

    def read_index(self, index: Tensor, bitmap: Tensor, *, layout: PackedLayout) -> None:
        """Decode ``index`` ``[R, index_words]`` to ``bitmap`` ``[R, bitmap_words]``, both int32."""
        ...

    def prepare_packed(
        self, layout: PackedLayout, gradient: torch.dtype, residual: torch.dtype | None
    ) -> None:
        """Compile the kernels of the other operators of this class."""
        ...

"""Contract of the operators of the ``packed`` codec, see :mod:`tagc.packed` for the format."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tagc.packed import PackedLayout


class PackedOps(Protocol):
    """Tensors are preallocated; outputs may hold garbage before. Rows need unit stride only in
    their last dimension; messages and indexes may be slices of wider buffers. ``R`` rows."""

    def pack(
        self,
        grad: Tensor,
        residual: Tensor | None,
        threshold: Tensor,
        support: Tensor | None,
        message: Tensor,
        counts: Tensor,
        *,
        layout: PackedLayout,
    ) -> None:
        """Accumulate, select, and pack the kept groups of every row into its message.

        Per row with ``x = float32(grad) + float32(residual)``:

        1. without a ``support``, groups are selected as the sketch does: largest ``|x|`` of at
           least ``threshold``; of more than ``capacity`` the largest stay, ties to the lower
           index; a capacity for all groups selects every non-zero one. With a ``support``, its
           groups are kept, and no others;
        2. a group with a non-finite ``x`` is not kept without a support, and sends zeros with one;
           its residual stays as it was and the poison word is set;
        3. the kept groups' ``x`` in a row, padded with zeros to ``capacity`` groups, are quantized
           in blocks as :meth:`tagc.ops.blocks.BlockOps.quantize` does; the residual keeps
           ``x - q * s``, and ``x`` of every other group, rounded to nearest even in its dtype
           (finite stays finite).

        Args:
            grad: ``[R, numel]`` float32, bfloat16 or float16.
            residual: ``[R, numel]`` float32 or bfloat16, updated in place; None for no feedback.
            threshold: ``[R]`` float32, positive; not read with a support.
            support: ``[R, bitmap_words]`` int32 with at most ``capacity`` groups in a row, or None.
            message: ``[R, words]`` int32, written; with a support all but its index.
            counts: ``[R, 4]`` int32, written: groups above the threshold (with a support: in it),
                finite groups that are not all zero, groups kept, 0.
        """
        ...

    def unpack(
        self,
        message: Tensor,
        support: Tensor | None,
        out: Tensor,
        *,
        layout: PackedLayout,
        divisor: int,
    ) -> None:
        """Add up the messages of all ranks into this rank's shard.

        Products ``q * s`` are exact in float32; they are added in float32 in the order of ``r``,
        starting from 0, divided by ``divisor`` (IEEE) and rounded to ``out``'s dtype. Groups that
        nobody sent are 0. If any poison word is set, all of ``out`` is NaN.

        Args:
            message: ``[R, words]`` int32.
            support: ``[bitmap_words]`` int32, what all ranks kept; None: each message's own index.
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
        """Mark the groups of every row that :meth:`pack` would keep, without packing anything.

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
        """Compile what the others will need."""
        ...

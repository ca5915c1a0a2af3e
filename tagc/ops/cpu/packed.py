"""The operators of sparse messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tagc.ops.blocks import MIN_BLOCK, BlockLayout
from tagc.ops.cpu.arrays import NO_SUPPORT, halves_of, numpy_of, rows_of, words_of
from tagc.ops.cpu.blocks import codes_of
from tagc.ops.cpu.compiling import once_a_host
from tagc.ops.cpu.kernels import bitmap as bitmaps
from tagc.ops.cpu.kernels.packer import pack_values
from tagc.ops.cpu.kernels.scalar import group_of
from tagc.ops.cpu.kernels.selection import keep_largest, select_groups
from tagc.ops.cpu.kernels.unpacker import unpack_shard
from tagc.ops.packed import HEADER, KEPT_GROUPS, POISON, PackedLayout, index_of, values_of


def pack(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    message: Tensor,
    counts: Tensor,
    *,
    layout: PackedLayout,
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.pack`."""
    if grad.dtype == torch.float16:  # numba has no float16 arithmetic on CPUs
        grad = grad.float()
    header, index = words_of(message[:, :HEADER]), words_of(index_of(message, layout))
    values, scale_words = values_of(message, layout), layout.values.scale_words
    scales, codes = halves_of(values[:, :scale_words]), words_of(values[:, scale_words:])
    levels = layout.values.levels
    limit, unit = np.float32(levels), np.float32(1 / levels)
    g, e, words = numpy_of(grad), numpy_of(residual), np.empty(layout.bitmap_words, np.uint32)
    for r in range(grad.shape[0]):
        row = None if e is None else e[r]
        above, nonzero, poison, keys, stream = _select(g[r], row, threshold[r], words, layout)
        _write_index(words, keys, index[r], layout)
        pack_values(
            row, layout.numel, layout.group, keys, stream, layout.values.block,
            codes_of(layout.values), limit, unit, scales[r], codes[r],
        )  # fmt: skip
        header[r, POISON], header[r, KEPT_GROUPS] = poison, keys.size
        counts.numpy()[r] = above, nonzero, keys.size, 0


def _select(
    g: Any, e: Any, threshold: Tensor, words: Any, layout: PackedLayout
) -> tuple[int, int, int, Any, Any]:
    """Mark the groups to keep, and accumulate into the residual.

    Args:
        g, e: ``[numel]``, gradient and residual of a row; ``e`` may be None.
        threshold: float32 scalar.
        words: ``[bitmap_words]`` uint32, written: the marks.

    Returns:
        The first two counts of :func:`pack`, the poison word, the keys of the groups, and their x.
    """
    n, group, capacity = layout.numel, group_of(layout.group), layout.capacity
    least = threshold.numpy().view(np.uint32)[()]
    chosen = least if capacity < layout.groups else np.uint32(1)
    above, nonzero, kept, poison, keys, stream = select_groups(
        g, e, n, group, least, chosen, NO_SUPPORT, capacity, words
    )
    if kept > capacity:
        keep_largest(layout.group, capacity, kept, keys, stream, words)
    return int(above), int(nonzero), int(poison), keys[: min(kept, capacity)], stream


def _keys(words: Any, layout: PackedLayout) -> Any:
    """The groups of a bitmap ``[bitmap_words]`` uint32: ``[count]`` uint32, ascending.

    Raises:
        ValueError: if they do not fit in a message.
    """
    keys = bitmaps.keys_of(words)
    while keys.size and keys[-1] >= layout.groups:
        keys = keys[:-1]
    if keys.size > layout.capacity:
        raise ValueError(f"a message with room for {layout.capacity} groups got {keys.size}")
    return keys


def _write_index(words: Any, keys: Any, index: Any, layout: PackedLayout) -> None:
    """Write ``index`` ``[index_words]`` uint32 from a bitmap whose groups are ``keys``."""
    if layout.low_bits:
        low, high = index[: layout.low_words], index[layout.low_words :]
        bitmaps.write_index(keys, layout.low_bits, low, high)
    else:
        index[:] = words


def _read_index(index: Any, keys: Any, layout: PackedLayout) -> int:
    """Write the groups of ``index`` ``[index_words]`` uint32 to ``keys``, uint32 with room for
    ``SLACK`` more than the capacity. Returns the number of groups."""
    low, high = index[: layout.low_words], index[layout.low_words :]
    if layout.low_bits:
        return int(bitmaps.read_index(layout.low_bits, low, high, keys, layout.capacity))
    return int(bitmaps.write_keys(high, keys, layout.capacity))


def unpack(message: Tensor, out: Tensor, *, layout: PackedLayout, divisor: int) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.unpack`."""
    words, stride = rows_of(message)
    wide = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float16 else out
    first_value = HEADER + layout.index_words
    poisoned = unpack_shard(
        words, stride, message.shape[0], first_value, first_value + layout.values.scale_words,
        layout.numel, layout.group, HEADER, HEADER + layout.low_words, layout.high_words,
        layout.low_bits, layout.capacity, layout.values.block, codes_of(layout.values),
        np.float32(divisor), numpy_of(wide),
    )  # fmt: skip
    if poisoned:
        out.fill_(torch.nan)
    elif wide is not out:
        out.copy_(wide)


def select(
    x: Tensor, threshold: Tensor, bitmap: Tensor, counts: Tensor, *, layout: PackedLayout
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.select`."""
    rows, words = numpy_of(x), words_of(bitmap)
    for r in range(x.shape[0]):
        above, nonzero, _, keys, _ = _select(rows[r], None, threshold[r], words[r], layout)
        counts.numpy()[r] = above, nonzero, keys.size, 0


def write_index(bitmap: Tensor, index: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.write_index`."""
    rows = words_of(bitmap)
    for r in range(bitmap.shape[0]):
        _write_index(rows[r], _keys(rows[r], layout), words_of(index[r]), layout)


def read_index(index: Tensor, bitmap: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.read_index`."""
    if not layout.low_bits:
        bitmap.copy_(index)
        return
    keys = np.empty(layout.capacity + bitmaps.SLACK, np.uint32)
    for r in range(index.shape[0]):
        count = _read_index(words_of(index[r]), keys, layout)
        bitmaps.write_bitmap(keys[:count], layout.groups, words_of(bitmap[r]))


@once_a_host
def _compile(
    group: int, low_bits: int, bits: int, gradient: torch.dtype, residual: torch.dtype | None
) -> None:
    """Run all operators once on a small input of these dtypes that overflows its capacity."""
    layout = PackedLayout(
        numel=2 * group,
        group=group,
        capacity=1,
        low_bits=low_bits,
        values=BlockLayout(numel=group, bits=bits, block=MIN_BLOCK),
    )
    grad = torch.ones(1, layout.numel, dtype=gradient, device="cpu")
    left = None if residual is None else torch.zeros(1, layout.numel, dtype=residual, device="cpu")
    message = torch.empty(1, layout.words, dtype=torch.int32, device="cpu")
    bitmap = torch.empty(1, layout.bitmap_words, dtype=torch.int32, device="cpu")
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    counts = torch.empty(1, 4, dtype=torch.int32, device="cpu")
    for dtype in {torch.float32, *({gradient, residual} & {torch.bfloat16})}:
        select(grad.to(dtype), one, bitmap, counts, layout=layout)
    pack(grad, left, one, message, counts, layout=layout)
    read_index(index_of(message, layout), bitmap, layout=layout)
    write_index(bitmap, index_of(message, layout), layout=layout)
    unpack(message, grad[0], layout=layout, divisor=1)


def prepare_packed(
    layout: PackedLayout, gradient: torch.dtype, residual: torch.dtype | None
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.prepare_packed`; seconds for new dtypes or groups."""
    _compile(layout.group, layout.low_bits, layout.values.bits, gradient, residual)

"""Pack: select groups, list them, write header, index and values. A sequence of kernels.

:mod:`.select` (the only dense pass) marks groups, accumulates the residual and sets the poison
word; :mod:`.trim` clears marks beyond the capacity; :mod:`.rank` and :mod:`.listing` list the
remaining groups; :mod:`.write_index` and :mod:`.values` write the message and the listed groups'
residual. A bitmap that is sent is made in the message itself.

Worked example (numel 8, groups of 2, capacity 2, threshold 3): x = (1, -4, 0, 1, 5, 0, 3, 3) has
the sizes 4, 1, 5, 3, and the capacity keeps 4 and 5: the header is (0, 2), the bitmap 0b0101, the
values are those of (1, -4, 5, 0), the counts (3, 4, 2, 0), and the residual keeps (0, 1, 3, 3) in
the other places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops import ABOVE, KEPT, NONZERO
from tagc.ops.packed import KEPT_GROUPS, POISON, PackedLayout, index_of

from .device import on_device_of
from .listing import LIST_WORDS, list_groups
from .rank import rank
from .scratch import buffer
from .select import select as select_groups
from .trim import trim
from .values import quantize_values
from .write_index import encode_index


@on_device_of("grad")
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
    R = grad.shape[0]
    index = index_of(message, layout)
    if layout.low_bits:
        bitmap = buffer("marks", (R, layout.bitmap_words), torch.int32, grad.device, layout)
    else:
        bitmap = index
    lanes, capacity = layout.group, layout.capacity
    select_groups(
        grad, residual, threshold, bitmap, message[:, POISON], counts,
        lanes=lanes, capacity=capacity,
    )  # fmt: skip
    trim(grad, residual, threshold, bitmap, counts, lanes=lanes, capacity=capacity, layout=layout)
    ranks = rank(
        bitmap, layout.groups, "bitmap", layout=layout, step=LIST_WORDS,
        counts=counts[:, KEPT], header=message[:, KEPT_GROUPS],
    )  # fmt: skip
    keys = list_groups(bitmap, ranks, layout.groups, capacity=capacity, layout=layout)
    if layout.low_bits:
        encode_index(keys, ranks, index, layout=layout)
    quantize_values(grad, residual, keys, ranks, message, layout=layout)


@on_device_of("x")
def select(
    x: Tensor, threshold: Tensor, bitmap: Tensor, counts: Tensor, *, layout: PackedLayout
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.select`."""
    lanes, capacity = layout.group, layout.capacity
    select_groups(x, None, threshold, bitmap, None, counts, lanes=lanes, capacity=capacity)
    trim(x, None, threshold, bitmap, counts, lanes=lanes, capacity=capacity, layout=layout)
    if capacity < layout.groups:
        torch.clamp(counts[:, ABOVE], max=capacity, out=counts[:, KEPT])
    else:
        counts[:, KEPT].copy_(counts[:, NONZERO])

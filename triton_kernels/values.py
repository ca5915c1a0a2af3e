"""Values: block-quantize the listed groups, one after the other; the residual keeps the errors.

Entry ``e`` of the values is element ``e % group`` of the listed group ``e // group``; entries past
the list are zeros. :mod:`.codes` describes scales, codes and quantization errors. Only the listed
groups' elements are touched.

Worked example (groups of 2): the list 3, 9 makes the entries x[6], x[7], x[18], x[19], 0, 0, ...
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.packed import PackedLayout, values_of

from .codes import blocks_and_warps, quantize_tile, store_message
from .gather import load_groups
from .jit import jit, tl
from .rank import Ranks
from .scalar import narrow_finite
from .sizes import cdiv

# Elements per thread; each may need its own address.
_EACH = 8
# Arguments whose alignment makes no difference.
_PLAIN = ["total", "capacity", "blocks", "scales", "scales_stride"]


@jit(do_not_specialize=_PLAIN)
def values_kernel(
    grad, residual, keys, total, scales, codes, n, capacity, blocks,
    grad_stride, residual_stride, scales_stride, codes_stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    slot = first * (BLOCK // GROUP) + tl.arange(0, BLOCKS * BLOCK // GROUP)
    listed = slot < tl.minimum(tl.load(total + r), capacity)
    key = tl.load(keys + r * capacity + slot, mask=listed, other=0)
    if residual is not None:
        residual += r * residual_stride
    x, j, inside = load_groups(grad + r * grad_stride, residual, key, listed, n, GROUP)
    tile = tl.reshape(x, [BLOCKS, 32 // BITS, BLOCK * BITS // 32])
    scale, words, left, _finite = quantize_tile((tile,), BITS)
    store_message(
        scales + r * scales_stride, codes + r * codes_stride, scale, words, first, blocks,
        BLOCKS, BLOCK * BITS // 32,
    )  # fmt: skip
    if residual is not None:
        left = tl.reshape(left[0], [BLOCKS * BLOCK // GROUP, GROUP])
        tl.store(residual + j, narrow_finite(left, residual.dtype.element_ty), mask=inside)


def quantize_values(
    grad: Tensor,
    residual: Tensor | None,
    keys: Tensor,
    ranks: Ranks,
    message: Tensor,
    *,
    layout: PackedLayout,
) -> None:
    """Write the values of ``message`` ``[R, words]`` and the residual of the listed groups.

    Args:
        grad, residual: as :func:`.select.select` and :func:`.trim.trim` left them.
        keys: ``[R, capacity]``, the list.
    """
    values = layout.values
    if values.blocks == 0:
        return
    blocks, warps = blocks_and_warps(values.block, _EACH)
    values_words = values_of(message, layout)
    scales, codes = values_words.view(torch.int16), values_words[:, values.scale_words :]
    values_kernel[(cdiv(2 * values.scale_words, blocks), grad.shape[0])](
        grad, residual, keys, ranks.total, scales, codes, layout.numel, layout.capacity,
        values.blocks, grad.stride(0), 0 if residual is None else residual.stride(0),
        scales.stride(0), codes.stride(0),
        GROUP=layout.group, BITS=values.bits, BLOCKS=blocks, BLOCK=values.block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip

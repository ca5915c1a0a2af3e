"""The operators of block quantization."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.ops.blocks import MIN_BLOCK, BlockLayout
from tagc.ops.cpu.arrays import halves_of, numpy_of, rows_of, words_of
from tagc.ops.cpu.compiling import once_a_host
from tagc.ops.cpu.kernels.quantizer import dequantize_shard, quantize_row
from tagc.ops.cpu.kernels.scalar import Group, group_of


def codes_of(layout: BlockLayout) -> Group:
    """The tuple whose length tells the kernels how many codes a word holds."""
    return group_of(32 // layout.bits)


def quantize(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: BlockLayout,
    average: float,
    dither: Tensor | None = None,
) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.quantize`."""
    if grad.dtype == torch.float16:  # numba has no float16 arithmetic on CPUs
        grad = grad.float()
    g, e = numpy_of(grad), numpy_of(residual)
    scales = halves_of(message[:, : layout.scale_words])
    codes = words_of(message[:, layout.scale_words :])
    limit, unit = np.float32(layout.levels), np.float32(1 / layout.levels)
    kept, fresh = np.float32(average), np.float32(1 - average)
    seeds = None if dither is None else dither.numpy().view(np.uint32)
    for r in range(grad.shape[0]):
        quantize_row(
            g[r], None if e is None else e[r], layout.numel, layout.block, codes_of(layout),
            limit, unit, kept, fresh, None if seeds is None else seeds[r], scales[r], codes[r],
        )  # fmt: skip


def dequantize(
    message: Tensor, out: Tensor, *, layout: BlockLayout, divisor: int, add: bool = False
) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.dequantize`."""
    # numba has no float16 arithmetic on CPUs.
    wide = out.float() if out.dtype == torch.float16 else out
    rows = numpy_of(wide)
    for k in range(message.shape[0]):
        words, stride = rows_of(message[k])
        dequantize_shard(
            words, stride, message.shape[1], layout.numel, layout.block, codes_of(layout),
            np.float32(divisor), add, rows[k],
        )  # fmt: skip
    if wide is not out:
        out.copy_(wide)


@once_a_host
def _compile(
    bits: int, gradient: torch.dtype, residual: torch.dtype | None, dithered: bool
) -> None:
    """Run both operators once on the smallest input of these dtypes."""
    layout = BlockLayout(numel=1, bits=bits, block=MIN_BLOCK)
    grad = torch.ones(1, 1, dtype=gradient, device="cpu")
    left = None if residual is None else torch.zeros(1, 1, dtype=residual, device="cpu")
    message = torch.empty(1, layout.words, dtype=torch.int32, device="cpu")
    seeds = torch.zeros(1, dtype=torch.int32, device="cpu") if dithered else None
    quantize(grad, left, message, layout=layout, average=0.0, dither=seeds)
    dequantize(message[None], grad, layout=layout, divisor=1)


def prepare_blocks(
    layout: BlockLayout,
    gradient: torch.dtype,
    residual: torch.dtype | None,
    average: float,
    *,
    dithered: bool = False,
) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.prepare_blocks`; seconds for new ``bits`` or dtypes."""
    _compile(layout.bits, gradient, residual, dithered)

"""Launches that quantize or dequantize, and what they do along the way: uncompressed pieces of the
same messages, and a fingerprint of what they are about.

Programs for that come after the launch's own. For matrices it is the launch that writes, or reads,
the heads of their messages.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import DenseLayout
from tagc.ops.matrix import AnyMatrices

from .blocks import STEPS, blocks_and_warps, quantize_blocks, sum_blocks
from .dense import put_arguments, put_dense, sum_arguments, sum_dense
from .fingerprint import fingerprint, fingerprint_arguments
from .jit import on_device_of
from .matrix_dequantize import HEAD_WARPS, sum_matrices
from .matrix_quantize import quantize_matrices, warps_of
from .matrix_runs import runs_of


@on_device_of("grad")
def quantize_and_put(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    dither: Tensor | None,
    x: Tensor,
    whole: Tensor,
    stamp: Tensor | None,
    sums: Tensor | None = None,
    before: Tensor | None = None,
    *,
    layout: BlockLayout | AnyMatrices,
    average: float,
    dense: DenseLayout,
) -> None:
    """See :func:`tagc.ops.reference.quantize_and_put`."""
    if isinstance(layout, BlockLayout):
        warps = blocks_and_warps(layout.block)[1]
    elif launches := runs_of(layout)[0]:
        warps = warps_of(launches[0])
    else:  # nothing is quantized
        put_dense(x, whole, stamp, layout=dense)
        if sums is not None and before is not None:
            fingerprint(x[0], sums, before)
        return
    puts, pieces = put_arguments(x, whole, stamp, dense, warps)
    more, pieces["puts"] = puts, puts
    if sums is not None:
        pieces |= {"sums": sums, "before": before, **fingerprint_arguments(x[0], warps)}
        more += pieces["parts"]
    if isinstance(layout, BlockLayout):
        quantize_blocks(grad, residual, message, dither, layout, average, more, **pieces)
    else:
        quantize_matrices(grad, residual, message, layout, average, more, **pieces)


@on_device_of("out")
def dequantize_and_sum(
    message: Tensor,
    out: Tensor,
    whole: Tensor,
    rows: Tensor,
    stamp: Tensor | None,
    wrong: Tensor | None,
    sent: Tensor | None = None,
    ahead: Tensor | None = None,
    *,
    layout: BlockLayout | AnyMatrices,
    divisor: int,
    add: bool,
    dense: DenseLayout,
    lead: float = 1.0,
) -> None:
    """See :func:`tagc.ops.reference.dequantize_and_sum`."""
    given = whole, rows, stamp, wrong, dense, divisor
    if isinstance(layout, BlockLayout):
        programs, pieces = sum_arguments(*given, blocks_and_warps(layout.block)[1])
        pieces["STEPS"] = STEPS
        sum_blocks(message, out, layout, divisor, add, programs, **pieces)
    elif runs_of(layout)[0]:
        programs, pieces = sum_arguments(*given, HEAD_WARPS)
        last = out if ahead is None else ahead[None]
        sum_matrices(message, last, layout, divisor, add, sent, lead, programs, **pieces)
    else:
        sum_dense(whole, rows, stamp, wrong, layout=dense, divisor=divisor)

"""Quantized blocks or matrices and uncompressed pieces of the same messages in one launch, and a
fingerprint of what they are about.

Most units have both: matrices, and norms beside them. On a GPU the pieces take as long as their
launch, and programs of the other launch can do it along the way. Here one operator runs after
another, for implementations to which calls cost little. (None reads what another writes.)
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import DenseLayout, is_spoilt, put_dense, spoil, sum_dense
from tagc.ops.fingerprint import take_fingerprint
from tagc.ops.lag import undo_lag
from tagc.ops.matrix import AnyMatrices


def quantize_and_put(
    ops: ModuleType,
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
    """``quantize``, or without a dither ``quantize_matrix``, and ``put_dense``.

    Args:
        ops: the implementation; implementations leave out this argument.
        x, whole, stamp: the rows, messages and stamp of ``put_dense``, with ``dense`` as its
            layout. ``message`` is a part of ``whole``, without pieces; ``grad`` is often a part
            of ``x``.
        sums, before: if given, ``fingerprint`` writes that of ``x`` to ``before``. Then ``x`` has
            one row.
    """
    if isinstance(layout, BlockLayout):
        ops.quantize(grad, residual, message, dither, layout=layout, average=average)
    else:
        ops.quantize_matrix(grad, residual, message, layout=layout, average=average)
    put_dense(x, whole, stamp, layout=dense)
    if sums is not None and before is not None:
        take_fingerprint(x[0], sums, before)


def dequantize_and_sum(
    ops: ModuleType,
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
    """``dequantize`` or ``dequantize_matrix``, and ``sum_dense``, with the same divisor.

    Args:
        whole, rows, stamp, wrong: the arguments of ``sum_dense``, with ``dense`` as its layout.
            ``message`` is a part of ``whole``, without pieces; ``out`` is often a part of
            ``rows``. What makes ``rows`` NaN also makes ``out`` NaN.
        sent, ahead, lead: if given, for matrices, ``undo_lag`` comes last, with ``out``, which has
            one row, as ``decoded``. If ``out`` is another tensor than ``ahead``, its content is
            then arbitrary.
    """
    decode = ops.dequantize if isinstance(layout, BlockLayout) else ops.dequantize_matrix
    decode(message, out, layout=layout, divisor=divisor, add=add)
    sum_dense(whole, rows, stamp, wrong, layout=dense, divisor=divisor)
    spoil(is_spoilt(whole, stamp, wrong, dense), out)
    if sent is not None and ahead is not None:
        undo_lag(out[0], sent, ahead, lead=lead)

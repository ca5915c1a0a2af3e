"""The operators of quantized matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tagc.ops.cpu.arrays import numpy_of, rows_of, words_of
from tagc.ops.cpu.compiling import once_a_host
from tagc.ops.cpu.kernels.matrix import dequantize_rows, quantize_columns, quantize_rows
from tagc.ops.cpu.kernels.scalar import Group, group_of
from tagc.ops.matrix import MatrixLayout


def _codes_of(layout: MatrixLayout) -> Group:
    """The tuple whose length tells the kernels how many codes a word holds."""
    return group_of(layout.places)


def quantize_matrix(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: MatrixLayout,
    average: float,
) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`."""
    if not layout.rows:
        return
    if grad.dtype == torch.float16:  # numba has no float16 arithmetic on CPUs
        grad = grad.float()
    g, e = numpy_of(grad), numpy_of(residual)
    v = np.empty(layout.columns, np.float32)
    kept, fresh = np.float32(average), np.float32(1 - average)
    for elements, words in layout.parts:
        heads, columns, rows, codes = _parts(message[:, words], layout)
        for d in range(grad.shape[0]):
            x, left = g[d, elements], None if e is None else e[d, elements]
            base = quantize_columns(x, left, layout.rows, v, columns[d])
            heads[d, 0] = base
            quantize_rows(
                x, left, layout.rows, v, np.uint32(base), np.uint64(layout.group),
                _codes_of(layout), np.float32(layout.distance), kept, fresh, rows[d], codes[d],
            )  # fmt: skip


def dequantize_matrix(
    message: Tensor, out: Tensor, *, layout: MatrixLayout, divisor: int, add: bool = False
) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.dequantize_matrix`."""
    if not layout.rows:
        return
    # numba has no float16 arithmetic on CPUs.
    wide = out.float() if out.dtype == torch.float16 else out
    elements = numpy_of(wide)
    base, columns, rows = layout.head
    for part, said in layout.parts:
        for k in range(message.shape[0]):
            words, stride = rows_of(message[k, :, said])
            dequantize_rows(
                words, stride, message.shape[1], base + columns, base + columns + rows,
                layout.rows, np.uint64(layout.group), _codes_of(layout), np.float32(divisor),
                add, elements[k, part],
            )  # fmt: skip
    if wide is not out:
        out.copy_(wide)


def _parts(message: Tensor, layout: MatrixLayout) -> tuple[Any, Any, Any, Any]:
    """The bases, the columns' scales, the rows' scales and the codes of a matrix's messages
    ``[R, words]``, each ``[R, ...]`` uint32."""
    sizes = [*layout.head, layout.rows * layout.row_words]
    heads, columns, rows, codes = (words_of(part) for part in message.split(sizes, dim=-1))
    return heads, columns, rows, codes


@once_a_host
def _compile(bits: int, group: int, gradient: torch.dtype, residual: torch.dtype | None) -> None:
    """Run both operators once on the smallest input of these dtypes."""
    layout = MatrixLayout(rows=1, columns=1, bits=bits, group=group)
    grad = torch.ones(1, 1, dtype=gradient, device="cpu")
    left = None if residual is None else torch.zeros(1, 1, dtype=residual, device="cpu")
    message = torch.empty(1, layout.words, dtype=torch.int32, device="cpu")
    quantize_matrix(grad, left, message, layout=layout, average=0.0)
    dequantize_matrix(message[None], grad, layout=layout, divisor=1)


def prepare_matrix(
    layout: MatrixLayout,
    gradient: torch.dtype,
    residual: torch.dtype | None,
    average: float,
) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.prepare_matrix`; seconds for new ``bits`` or dtypes."""
    _compile(layout.bits, layout.group, gradient, residual)

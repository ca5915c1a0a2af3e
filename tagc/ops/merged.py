"""Quantized blocks and uncompressed pieces of the same messages, in one launch.

Most units have both: matrices, and norms beside them. On a GPU the pieces take as long as their
launch, and programs of the other launch can do it along the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import DenseLayout, is_spoilt, put_dense, spoil, sum_dense


class MergedOps(Protocol):
    """Two operators in one, in any order: neither reads what the other writes."""

    def quantize_and_put(
        self,
        grad: Tensor,
        residual: Tensor | None,
        message: Tensor,
        dither: Tensor | None,
        x: Tensor,
        whole: Tensor,
        stamp: Tensor | None,
        *,
        layout: BlockLayout,
        average: float,
        dense: DenseLayout,
    ) -> None:
        """:meth:`tagc.ops.blocks.BlockOps.quantize` and :meth:`tagc.ops.dense.DenseOps.put_dense`.

        Args:
            x, whole, stamp: the rows, messages and stamp of ``put_dense``, with ``dense`` as its
                layout. ``message`` is a part of ``whole``, without pieces; ``grad`` is often a part
                of ``x``.
        """
        ...

    def dequantize_and_sum(
        self,
        message: Tensor,
        out: Tensor,
        whole: Tensor,
        rows: Tensor,
        stamp: Tensor | None,
        wrong: Tensor | None,
        *,
        layout: BlockLayout,
        divisor: int,
        add: bool,
        dense: DenseLayout,
    ) -> None:
        """:meth:`tagc.ops.blocks.BlockOps.dequantize` and
        :meth:`tagc.ops.dense.DenseOps.sum_dense`, with the same divisor.

        Args:
            whole, rows, stamp, wrong: the arguments of ``sum_dense``, with ``dense`` as its layout.
                ``message`` is a part of ``whole``, and ``out`` one of ``rows``, without pieces.
                What makes ``rows`` NaN also makes ``out`` NaN.
        """
        ...


def merged(
    quantize: Callable[..., None], dequantize: Callable[..., None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """:class:`MergedOps` of an implementation to which calls cost little: one after another."""

    def quantize_and_put(
        grad: Tensor,
        residual: Tensor | None,
        message: Tensor,
        dither: Tensor | None,
        x: Tensor,
        whole: Tensor,
        stamp: Tensor | None,
        *,
        layout: BlockLayout,
        average: float,
        dense: DenseLayout,
    ) -> None:
        quantize(grad, residual, message, layout=layout, average=average, dither=dither)
        put_dense(x, whole, stamp, layout=dense)

    def dequantize_and_sum(
        message: Tensor,
        out: Tensor,
        whole: Tensor,
        rows: Tensor,
        stamp: Tensor | None,
        wrong: Tensor | None,
        *,
        layout: BlockLayout,
        divisor: int,
        add: bool,
        dense: DenseLayout,
    ) -> None:
        dequantize(message, out, layout=layout, divisor=divisor, add=add)
        sum_dense(whole, rows, stamp, wrong, layout=dense, divisor=divisor)
        spoil(is_spoilt(whole, stamp, wrong, dense), out)

    return quantize_and_put, dequantize_and_sum

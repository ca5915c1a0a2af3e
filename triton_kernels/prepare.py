"""Preparations do nothing: rehearsals in :func:`.jit.compiling_only` compile the kernels."""

from __future__ import annotations

import torch

from tagc.ops.blocks import BlockLayout
from tagc.ops.exact import ExactLayout
from tagc.ops.matrix import AnyMatrices
from tagc.ops.sketch import SketchLayout


def prepare(layout: SketchLayout, gradient: torch.dtype, residual: torch.dtype | None) -> None:
    """See :meth:`tagc.ops.sketch.SketchOps.prepare`."""


def prepare_blocks(
    layout: BlockLayout,
    gradient: torch.dtype,
    residual: torch.dtype | None,
    average: float,
    *,
    dithered: bool = False,
) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.prepare_blocks`."""


def prepare_exact(layout: ExactLayout) -> None:
    """See :meth:`tagc.ops.exact.ExactOps.prepare_exact`."""


def prepare_exponents() -> None:
    """See :meth:`tagc.ops.exponents.ExponentOps.prepare_exponents`."""


def prepare_lag() -> None:
    """See :meth:`tagc.ops.lag.LagOps.prepare_lag`."""


def prepare_matrix(
    layout: AnyMatrices, gradient: torch.dtype, residual: torch.dtype | None, average: float
) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.prepare_matrix`."""


def prepare_thresholds() -> None:
    """See :meth:`tagc.ops.thresholds.ThresholdOps.prepare_thresholds`."""

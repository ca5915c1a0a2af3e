"""Direct: if every group has its own cell, the dense pass makes the sketch.

:mod:`.select` writes the cells, 0 for groups that are not kept, and leaves the quantization error
in the residual; nothing is listed, cleared or read twice. :mod:`.trim` restores x of a group from
its cell and its residual. It clears the cells of dropped groups, and puts their x back.

This restores the bits of x, except for elements of 2**24 steps and more, and for -0. If groups may
be dropped, groups with such elements are put off: the residual keeps their x, and trimming sends
those that stay. A bfloat16 residual cannot restore x, so :mod:`.emit` sends its groups.

Worked example (int8x4, step 0.5, levels 3, capacity 1): for the groups (1, 0, 0, 0) and (2, 0, 0,
0.1) the dense pass writes the cells 2 and 3 (3 is clipped), and the residuals (0, 0, 0, 0) and
(0.5, 0, 0, 0.1). The first group is dropped: its cell becomes 0, its residual 0 + 2 * 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout


@dataclass(frozen=True, kw_only=True)
class Direct:
    """The cells that the dense pass writes.

    Attributes:
        cells: ``[W, groups]`` int32.
        step: ``[W]`` float32 powers of two.
        levels: largest magnitude of a lane.
    """

    cells: Tensor
    step: Tensor
    levels: int


def in_one_pass(layout: SketchLayout, residual: Tensor | None) -> bool:
    """Whether the dense pass makes the sketch."""
    return layout.direct and (residual is None or residual.dtype == torch.float32)


def arguments(direct: Direct | None) -> tuple[Any, ...]:
    """Arguments of a kernel: cells, step, levels."""
    if direct is None:
        return None, None, 0.0
    return direct.cells, direct.step, float(direct.levels)


def stride(direct: Direct | None) -> int:
    """Stride of the cells' rows."""
    return 0 if direct is None else direct.cells.stride(0)

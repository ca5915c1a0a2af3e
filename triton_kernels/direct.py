"""Direct: a sketch where every group has a cell of its own is made in the dense pass.

:mod:`.select` writes cells, 0 for groups that are not kept, and leaves in the residual what they do
not say: nothing is listed, cleared or read twice. :mod:`.trim` finds x of a group in its cell and
its residual, clears the cells of groups that go, and puts x back.

That gives x to the bit but for what is 2**24 steps and larger, or a -0. Groups with such elements
are put off, where groups may go: the residual keeps their x, and trimming, once it knows which of
them stay, sends those. A bfloat16 residual cannot give x back, so its groups are sent by
:mod:`.emit` after all.

Worked example (int8x4, step 0.5, levels 3, capacity 1): of the groups (1, 0, 0, 0) and (2, 0, 0,
0.1) the dense pass writes the cells 2 and 3, the latter being clipped, and the residuals (0, 0, 0,
0) and (0.5, 0, 0, 0.1). The first group goes: its cell becomes 0, its residual 0 + 2 * 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout


@dataclass(frozen=True, kw_only=True)
class Direct:
    """Cells that the dense pass writes.

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
    """Of a kernel: cells, step, levels."""
    if direct is None:
        return None, None, 0.0
    return direct.cells, direct.step, float(direct.levels)


def stride(direct: Direct | None) -> int:
    """Of the cells."""
    return 0 if direct is None else direct.cells.stride(0)

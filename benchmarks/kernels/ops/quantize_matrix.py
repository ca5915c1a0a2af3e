"""``quantize_matrix``: accumulate, scale rows and columns, round to codes, residual.

The scales need a pass over gradient and residual before the one that rounds; the floor has one.
"""

from __future__ import annotations

import torch

from ..case import Case
from ..registry import Problem
from .codecs import matrix
from .messages import make_row, sending

axes = ("residual", "code")


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on one input."""
    row = make_row(case, device, case.residual_dtype)
    return sending(row, matrix(case, row))

"""``quantize``: accumulate, scale each block, round to a few bits, residual."""

from __future__ import annotations

import torch

from ..case import Case
from ..registry import Problem
from .codecs import blocks
from .messages import make_row, sending

axes = ("residual", "bits")


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on one input."""
    row = make_row(case, device, case.residual_dtype)
    return sending(row, blocks(case, row))

"""``unpack``: add up two ranks' packed messages into this rank's shard."""

from __future__ import annotations

import torch

from ..case import Case
from ..registry import Problem
from .codecs import packed
from .messages import make_row, receiving

axes = ("density",)


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on the same messages."""
    row = make_row(case, device, torch.float32)
    return receiving(row, packed(case, row))

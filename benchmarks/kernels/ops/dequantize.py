"""``dequantize``: add up two ranks' messages into this rank's shard.

The floor is reading the messages and writing the shard.
"""

from __future__ import annotations

import torch

from tagc.ops import Ops, reference

from ..case import Case
from ..registry import Contender, Problem
from .inputs import ours
from .messages import RANKS, block_layout, make_row, new_message

axes = ("bits",)


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on the same messages; the shard has the gradient's dtype."""
    row, layout = make_row(case, device, torch.float32), block_layout(case)
    sent = new_message(layout, device)
    reference.quantize(row.grad, None, sent, layout=layout, average=0.0)
    messages = sent.expand(RANKS, -1).clone()[None]
    expected = torch.empty_like(row.grad)
    ops, note = ours(device)
    return Problem(
        floor_bytes=case.numel * row.grad.element_size() + 4 * RANKS * layout.words,
        contenders={
            "reference": lambda: _sum(reference, "eager torch", case, messages, expected),
            "tagc": lambda: _sum(ops, note, case, messages, torch.empty_like(expected), expected),
            "clone": lambda: Contender(run=row.grad.clone, note="the gradient"),
        },
    )


def _sum(
    ops: Ops,
    note: str,
    case: Case,
    messages: torch.Tensor,
    out: torch.Tensor,
    expected: torch.Tensor | None = None,
) -> Contender:
    layout = block_layout(case)

    def check() -> str | None:
        if expected is None or torch.equal(out, expected):
            return None
        return "the shard differs from the reference's"

    return Contender(
        run=lambda: ops.dequantize(messages, out, layout=layout, divisor=RANKS),
        check=check,
        note=note,
    )

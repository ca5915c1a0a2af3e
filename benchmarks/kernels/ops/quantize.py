"""``quantize``: accumulate, scale each block, round to a few bits, residual.

The floor is reading gradient and residual and writing the residual and the message.
"""

from __future__ import annotations

import torch

from tagc.ops import Ops, reference

from ..case import Case
from ..registry import Contender, Problem
from .inputs import difference, ours
from .messages import Row, block_layout, make_row, new_message, tolerance

axes = ("residual", "bits")


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on one input; each writes a residual and a message of its own."""
    row, layout = make_row(case, device, case.residual_dtype), block_layout(case)
    expected = new_message(layout, device)
    ops, note = ours(device)
    size = row.grad.element_size() + 2 * row.residual.element_size()
    return Problem(
        floor_bytes=case.numel * size + 4 * layout.words,
        contenders={
            "reference": lambda: _quantize(reference, "eager torch", case, row, expected),
            "tagc": lambda: _quantize(ops, note, case, row, new_message(layout, device), expected),
            "clone": lambda: Contender(run=row.grad.clone, note="the gradient"),
        },
    )


def _quantize(
    ops: Ops,
    note: str,
    case: Case,
    row: Row,
    message: torch.Tensor,
    expected: torch.Tensor | None = None,
) -> Contender:
    layout, residual = block_layout(case), row.residual.clone()

    def check() -> str | None:
        out = torch.empty_like(row.x)
        reference.dequantize(message[None], out[None], layout=layout, divisor=1)
        whole = out + residual[0].float()
        wrong = difference(whole, row.x, tolerance(row), "sent plus residual is not the gradient")
        if wrong is None and expected is not None and not torch.equal(message, expected):
            return "the message differs from the reference's"
        return wrong

    return Contender(
        run=lambda: ops.quantize(row.grad, residual, message, layout=layout, average=0.0),
        before=lambda: residual.copy_(row.residual),
        check=check,
        note=note,
    )

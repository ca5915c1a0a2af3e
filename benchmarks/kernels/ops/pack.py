"""``pack``: accumulate, select the largest elements, index and quantize them, residual.

The floor is reading gradient and residual and writing the residual and the message.
"""

from __future__ import annotations

import torch

from tagc.ops import COUNTS, Ops, reference

from ..case import Case
from ..registry import Contender, Problem
from .inputs import difference, ours
from .messages import Row, make_row, new_message, packed_layout, threshold_of, tolerance

axes = ("residual", "density", "bits")


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on one input; each writes a residual and a message of its own."""
    row, layout = make_row(case, device, case.residual_dtype), packed_layout(case)
    expected = new_message(layout, device)
    ops, note = ours(device)
    size = row.grad.element_size() + 2 * row.residual.element_size()
    return Problem(
        floor_bytes=case.numel * size + 4 * layout.words,
        contenders={
            "reference": lambda: _pack(reference, "eager torch", case, row, expected),
            "tagc": lambda: _pack(ops, note, case, row, new_message(layout, device), expected),
            "topk": lambda: _top_k(row, layout.capacity),
            "clone": lambda: Contender(run=row.grad.clone, note="the gradient"),
        },
        facts={"low_bits": layout.low_bits, "words": layout.words},
    )


def _pack(
    ops: Ops,
    note: str,
    case: Case,
    row: Row,
    message: torch.Tensor,
    expected: torch.Tensor | None = None,
) -> Contender:
    layout, residual = packed_layout(case), row.residual.clone()
    threshold = threshold_of(case, row.x)
    counts = torch.empty(1, COUNTS, dtype=torch.int32, device=message.device)

    def check() -> str | None:
        out = torch.empty_like(row.x)
        reference.unpack(message, None, out, layout=layout, divisor=1)
        whole = out + residual[0].float()
        wrong = difference(whole, row.x, tolerance(row), "sent plus residual is not the gradient")
        if wrong is None and expected is not None and not torch.equal(message, expected):
            return "the message differs from the reference's"
        return wrong

    return Contender(
        run=lambda: ops.pack(
            row.grad, residual, threshold, None, message, counts, layout=layout
        ),
        before=lambda: residual.copy_(row.residual),
        check=check,
        note=note,
    )


def _top_k(row: Row, keep: int) -> Contender:
    """Values and indexes as torch gives them, 64 bits an element, not quantized."""
    residual = row.residual.clone()
    sent = torch.zeros_like(row.x)

    def run() -> None:
        x = row.grad[0].float() + residual[0].float()
        where = x.abs().topk(keep, sorted=False).indices
        sent.zero_()
        sent[where] = x[where]
        x[where] = 0
        residual[0].copy_(x)

    def check() -> str | None:
        whole = sent + residual[0].float()
        return difference(whole, row.x, tolerance(row), "sent plus residual is not the gradient")

    return Contender(
        run=run,
        before=lambda: residual.copy_(row.residual),
        check=check,
        note="torch.topk of single elements",
    )

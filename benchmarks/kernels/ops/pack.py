"""``pack``: accumulate, select the largest elements, index and quantize them, residual."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..case import Case
from ..registry import Contender, Problem
from .codecs import packed
from .inputs import difference
from .messages import Row, make_row, sending, tolerance

axes = ("residual", "density")


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on one input."""
    row = make_row(case, device, case.residual_dtype)
    codec = packed(case, row)
    found = sending(row, codec)
    top_k = {"topk": lambda: _top_k(row, codec.facts["capacity"])}
    return replace(found, contenders=found.contenders | top_k)


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
        whole, allowed = sent + residual[0].float(), tolerance(row, residual)
        return difference(whole, row.x, allowed, "sent plus residual is not the gradient")

    return Contender(
        run=run,
        before=lambda: residual.copy_(row.residual),
        check=check,
        note="torch.topk of single elements",
    )

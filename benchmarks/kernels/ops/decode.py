"""``decode``: OR the bitmaps, peel the cells, dequantize, write this rank's shard.

The floor is writing the shard and reading one bit per group. A single rank's message is decoded;
with more, the union's keys are the same work.
"""

from __future__ import annotations

import torch

from tagc.ops import Ops, reference

from ..case import Case
from ..registry import Contender, Problem
from .inputs import Inputs, Outputs, difference, make_inputs, ours
from .row_hash import RowHash
from .top_k import TopK

axes = ("residual", "density", "symbol")


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on what was encoded from one input; the shard has the gradient's dtype."""
    data = make_inputs(case, device)
    ops, note = ours(device)
    sent = data.outputs()
    data.encode(ops, sent)
    expected = data.grad.new_full((case.numel,), torch.nan)  # of the reference, if it runs
    return Problem(
        floor_bytes=case.numel * data.grad.element_size() + int(data.index_bytes),
        contenders={
            "tagc": lambda: _sketch(ops, note, data, sent, torch.empty_like(expected), expected),
            "reference": lambda: _sketch(reference, "eager torch", data, sent, expected, None),
            "topk": lambda: _top_k(data),
            "row-hash": lambda: _row_hash(data),
            "clone": lambda: Contender(run=data.grad.clone, note="the gradient"),
        },
        facts={"cells": data.layout.cells, "kept": data.kept},
    )


def _sketch(
    ops: Ops,
    note: str,
    data: Inputs,
    sent: Outputs,
    out: torch.Tensor,
    expected: torch.Tensor | None,
) -> Contender:
    cells = sent.cells[0].clone()  # may be overwritten
    stats = torch.zeros(2, dtype=torch.int32, device=out.device)
    details: dict[str, str] = {}

    def check() -> str | None:
        if stats[1]:
            return f"{int(stats[1])} groups are unresolved"
        # The shard rounds to the gradient's dtype.
        rounding = 0.0 if out.dtype == torch.float32 else data.x.abs() * 2.0**-8
        whole = out.float() + sent.residual[0].float()
        wrong = difference(
            whole, data.x, data.tolerance + rounding, "shard plus residual is not the gradient"
        )
        if wrong or expected is None:
            return wrong
        if expected.isnan().any():
            details["compared"] = "with nothing: the reference failed"
            return None
        return difference(out, expected, 0.0, "the shard differs from the reference's")

    return Contender(
        run=lambda: data.decode(ops, sent.index, cells, out, stats),
        before=lambda: cells.copy_(sent.cells[0]),
        check=check,
        note=note,
        details=details,
    )


def _top_k(data: Inputs) -> Contender:
    codec, out = TopK(data.layout, data.kept), torch.empty_like(data.grad[0])
    residual = data.residual[0].clone()
    codec.encode(data.grad[0], residual)

    def check() -> str | None:
        rounding = 0.0 if out.dtype == torch.float32 else data.x.abs() * 2.0**-8
        whole = out.float() + residual.float()
        return difference(whole, data.x, data.tolerance + rounding, "kept plus residual is not x")

    return Contender(run=lambda: codec.decode(out), check=check, note=codec.note)


def _row_hash(data: Inputs) -> Contender:
    codec, out = RowHash(data), torch.empty_like(data.grad[0])
    codec.encode(data.grad[0], data.residual[0].clone())
    details: dict[str, float] = {}
    unrecovered = torch.zeros((), dtype=torch.int64, device=out.device)

    def check() -> str | None:
        wrong = codec.check(out, unrecovered)
        details.update(codec.details)
        return wrong

    return Contender(
        run=lambda: unrecovered.copy_(codec.decode(out)),
        check=check,
        note=codec.note,
        details=details,
    )

"""``encode``: accumulate, select, quantize, sketch, residual; all that a rank does to send.

The floor is reading gradient and residual, writing the residual and one bit per group: 12 bytes
and that bit for float32. Cells are not in it: they are the price of this codec, not of the task.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tagc.ops import Ops, reference

from ..case import Case
from ..registry import Contender, Problem
from .inputs import Inputs, Outputs, difference, make_inputs, ours
from .row_hash import RowHash
from .top_k import TopK

axes = ("residual", "density", "symbol")


def problem(case: Case, device: torch.device) -> Problem:
    """All contenders on one input; each writes a residual of its own."""
    data = make_inputs(case, device)
    n, r = case.numel, data.residual.element_size()
    expected = data.outputs()  # of the reference, if it runs
    expected.counts.fill_(-1)
    ops, note = ours(device)
    return Problem(
        floor_bytes=n * (data.grad.element_size() + 2 * r) + int(data.index_bytes),
        contenders={
            "tagc": lambda: _sketch(ops, note, data, data.outputs(), expected),
            "reference": lambda: _sketch(reference, "eager torch", data, expected, None),
            "topk": lambda: _top_k(data),
            "row-hash": lambda: _row_hash(data),
            "clone": lambda: Contender(run=data.grad.clone, note="the gradient"),
        },
        facts={"cells": data.layout.cells, "kept": data.kept},
    )


def _restore(data: Inputs, to: Outputs) -> Callable[[], object]:
    return lambda: to.residual.copy_(data.residual)


def _sketch(ops: Ops, note: str, data: Inputs, to: Outputs, expected: Outputs | None) -> Contender:
    details: dict[str, str] = {}

    def check() -> str | None:
        out = torch.empty_like(data.x)
        stats = torch.zeros(2, dtype=torch.int32, device=out.device)
        data.decode(reference, to.index, to.cells[0].clone(), out, stats)
        if stats[1]:
            return f"the reference cannot decode {int(stats[1])} groups"
        whole = out + to.residual[0].float()
        wrong = difference(whole, data.x, data.tolerance, "sent plus residual is not the gradient")
        if wrong or expected is None:
            return wrong
        if expected.counts.min() < 0:
            details["compared"] = "with nothing: the reference failed"
            return None
        for name in ("index", "counts", "residual", "cells"):
            if not torch.equal(getattr(to, name), getattr(expected, name)):
                return f"{name} differs from the reference's"
        return None

    return Contender(
        run=lambda: data.encode(ops, to),
        before=_restore(data, to),
        check=check,
        note=note,
        details=details,
    )


def _top_k(data: Inputs) -> Contender:
    codec, to = TopK(data.layout, data.kept), data.outputs()

    def check() -> str | None:
        out = torch.empty_like(data.x)
        codec.decode(out)
        return difference(
            out + to.residual[0].float(), data.x, data.tolerance, "kept plus residual is not x"
        )

    return Contender(
        run=lambda: codec.encode(data.grad[0], to.residual[0]),
        before=_restore(data, to),
        check=check,
        note=codec.note,
    )


def _row_hash(data: Inputs) -> Contender:
    codec, to = RowHash(data), data.outputs()
    details: dict[str, float] = {}

    def check() -> str | None:
        out = torch.empty_like(data.x)
        wrong = codec.check(out, codec.decode(out))
        details.update(codec.details)
        return wrong

    return Contender(
        run=lambda: codec.encode(data.grad[0], to.residual[0]),
        before=_restore(data, to),
        check=check,
        note=codec.note,
        details=details,
    )

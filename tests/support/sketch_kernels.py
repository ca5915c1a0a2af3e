"""Problems for the Triton operators of sketches, and their check against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support import oracle
from support.kernel_cases import canonical, check_margins, kernels, placed, same
from tagc.codecs.sketch.plan import quantization_step
from tagc.ops import reference
from tagc.ops.bitmap import to_bitmap
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS

F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32


@dataclass
class Problem:
    """Arguments of encode for ``W`` destinations, on the CPU."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    step: Tensor
    seed: Tensor
    layout: SketchLayout
    levels: int
    capacity: int
    support: Tensor | None = None


# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.2),
    "overflow": (0.5, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "all above": (1.0, 0.5),
    "room for all": (0.2, 1.0),
}


def problem(symbol, grad_dtype, residual_dtype, n, mode, *, W=2, hashes=0, room=3.0, seed=0):
    """``hashes`` and ``room``, cells per kept group, make a layout; 0 takes the planned one."""
    rng = np.random.default_rng([n, seed])
    above, keep = MODES[mode]
    symbol = SYMBOLS[symbol]

    grad = oracle.values((W, n), rng).to(grad_dtype)
    residual = None if residual_dtype is None else oracle.values((W, n), rng).to(residual_dtype)
    groups = -(-n // symbol.lanes)
    x = grad.float() if residual is None else grad.float() + residual.float()
    whole = torch.nn.functional.pad(x, (0, groups * symbol.lanes - n)).unflatten(1, (groups, -1))
    size = whole.abs().amax(-1).sort(1, descending=True).values
    threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-20)
    if mode == "empty":
        threshold = torch.full((W,), 2.0**20)
    capacity = int(keep * groups)
    levels = symbol.levels(W)
    keys = W * capacity
    layout = plan_layout(n, symbol, keys)
    if hashes:
        cells = max(32, int(room * min(keys, groups)))
        layout = SketchLayout(
            numel=n, symbol=symbol, keys=keys, hashes=hashes, partition=-(-cells // hashes)
        )
    return Problem(
        grad, residual, threshold, quantization_step(threshold, symbol, levels),
        torch.from_numpy(rng.integers(-(2**31), 2**31, 1, dtype=np.int32)),
        layout, levels, capacity,
    )  # fmt: skip


def run_encode(ops, p: Problem, device: str, aligned: bool) -> dict[str, Tensor | None]:
    W, layout = p.grad.shape[0], p.layout
    out = {
        "index": oracle.poisoned(W, layout.index_words, dtype=I32),
        "cells": oracle.poisoned(W, layout.cells, dtype=I32),
        "counts": oracle.poisoned(W, 4, dtype=I32),
        "residual": p.residual,
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    grad, support = placed(p.grad, device, aligned), placed(p.support, device, aligned)
    ops.encode(
        grad, out["residual"], p.threshold.to(device), p.step.to(device), p.seed.to(device),
        out["index"], out["cells"], out["counts"],
        layout=layout, levels=p.levels, capacity=p.capacity, support=support,
    )  # fmt: skip
    same("gradient", grad, p.grad)
    same("support", support, p.support)
    for tensor in out.values():
        check_margins(tensor)
    return out


def run_decode(
    ops, index, cells, p: Problem, dtype, divisor, device: str, aligned: bool
) -> dict[str, Tensor | None]:
    out = {
        "out": oracle.poisoned(p.layout.numel, dtype=dtype),
        "residual": None if p.residual is None else p.residual[0],
        "stats": oracle.poisoned(2, dtype=I32),
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    ops.decode(
        placed(index, device, aligned), placed(cells, device, aligned), p.step[:1].to(device),
        p.seed.to(device), out["out"], out["residual"], out["stats"],
        layout=p.layout, divisor=divisor,
    )  # fmt: skip
    for tensor in out.values():
        check_margins(tensor)
    return out


def check(p: Problem, device: str, *, out=F32, divisor=3, aligned=False) -> dict[str, Any]:
    """Compare encode and decode with the reference; return the results and encode's residual."""
    ops = kernels("ops")
    want = run_encode(reference, p, "cpu", aligned)
    got = run_encode(ops, p, device, aligned)
    for name, tensor in want.items():
        same(name, got[name], tensor)
    index, cells = want["index"], want["cells"]
    assert index is not None
    assert cells is not None
    total = cells.sum(0, dtype=I32)
    decoded = run_decode(reference, index, total, p, out, divisor, "cpu", aligned)
    result = run_decode(ops, index, total, p, out, divisor, device, aligned)
    for name, tensor in decoded.items():
        same(name, canonical(result[name]), canonical(tensor))
    return {**decoded, **want}


def share(p: Problem, seed: int = 0) -> Problem:
    """With a random support of a third of the groups."""
    rng, groups = np.random.default_rng(seed), p.layout.groups
    p.support = to_bitmap(torch.from_numpy(rng.random((p.grad.shape[0], groups)) < 1 / 3))
    if groups % 32:  # bits past the last group mean nothing
        p.support[:, -1] |= torch.tensor(-1 << groups % 32, dtype=I32)
    return p


def check_codec(layout: SketchLayout, present: Tensor, symbols: Tensor, device: str) -> Tensor:
    """Compare ``insert`` and ``peel`` with the reference; return the leftover keys."""
    ops = kernels("ops")
    index, seed = to_bitmap(present), torch.tensor([-7], dtype=I32)
    tail = present.numel() % 32
    if tail:
        index[-1] |= torch.tensor(-1 << tail, dtype=I32)  # bits past the last group mean nothing
    want = oracle.poisoned(layout.cells, dtype=symbols.dtype)
    reference.insert(symbols, index, seed, want, layout=layout)
    cells = oracle.poisoned(layout.cells, dtype=symbols.dtype).to(device)
    ops.insert(symbols.to(device), index.to(device), seed.to(device), cells, layout=layout)
    same("cells", cells, want)
    peeled, stuck = reference.peel(want, index, seed, layout=layout)
    got, got_stuck = ops.peel(cells, index.to(device), seed.to(device), layout=layout)
    same("symbols", got, peeled)
    same("unresolved", got_stuck, stuck)
    same("cells after peeling", cells, want)
    return stuck

"""Problems for the Triton operators of sparse packing, and their check against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from support import oracle
from support.kernel_cases import canonical, check_margins, kernels, placed, same
from tagc.ops import reference
from tagc.ops.bitmap import to_bitmap
from tagc.ops.packed import PackedLayout, plan_packed

F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32
LOW_BITS = (0, 1, 2, 4, 8, 16)


@dataclass
class Problem:
    """Arguments of pack, on the CPU."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    layout: PackedLayout


# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.2),
    "overflow": (0.5, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "all above": (1.0, 0.5),
    "room for all": (0.2, 1.0),
}


def problem(
    n: int,
    mode: str,
    *,
    bits: int = 8,
    group: int = 1,
    block: int = 32,
    low: int | None = None,
    grad: torch.dtype = F32,
    residual: torch.dtype | None = F32,
    R: int = 2,
    seed: int = 0,
) -> Problem:
    """``low``: the number of low bits; None takes the planned one."""
    rng = np.random.default_rng([n, group, seed])
    above, keep = MODES[mode]
    groups = -(-n // group)
    capacity = int(keep * groups)
    layout = plan_packed(n, capacity=capacity, group=group, bits=bits, block=block)
    if low is not None:
        layout = replace(layout, low_bits=low)
    g = oracle.values((R, n), rng).to(grad)
    r = None if residual is None else oracle.values((R, n), rng).to(residual)
    x = g.float() if r is None else g.float() + r.float()
    whole = torch.nn.functional.pad(x, (0, groups * group - n)).unflatten(1, (groups, -1))
    size = whole.abs().amax(-1).sort(1, descending=True).values
    threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-20)
    if mode == "empty":
        threshold = torch.full((R,), 2.0**20)
    return Problem(g, r, threshold, layout)


def packed(ops, p: Problem, device: str, aligned: bool = False) -> dict[str, Tensor | None]:
    R = p.grad.shape[0]
    out = {
        "message": oracle.poisoned(R, p.layout.words, dtype=I32),
        "counts": oracle.poisoned(R, 4, dtype=I32),
        "residual": p.residual,
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    grad, threshold = placed(p.grad, device, aligned), p.threshold.to(device)
    ops.pack(grad, out["residual"], threshold, out["message"], out["counts"], layout=p.layout)
    same("gradient", grad, p.grad)
    for tensor in out.values():
        check_margins(tensor)
    return out


def check_sum(
    message: Tensor,
    layout: PackedLayout,
    device: str,
    *,
    dtype=F32,
    divisor=3,
    aligned=False,
) -> Tensor:
    """Compare unpack with the reference."""
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        result = placed(oracle.poisoned(layout.numel, dtype=dtype), where, aligned)
        sent = placed(message, where, aligned)
        ops.unpack(sent, result, layout=layout, divisor=divisor)
        same("message", sent, message)
        check_margins(result)
        out.append(result)
    same("out", canonical(out[1]), canonical(out[0]))
    return out[0]


def check(p: Problem, device: str, *, dtype=F32, divisor=3, aligned=False) -> dict[str, Tensor]:
    """Compare packing and adding up all rows with the reference; return the sum."""
    want = packed(reference, p, "cpu", aligned)
    got = packed(kernels("ops"), p, device, aligned)
    for name, tensor in want.items():
        same(name, got[name], tensor)
    message = want["message"]
    assert message is not None
    out = check_sum(message, p.layout, device, dtype=dtype, divisor=divisor, aligned=aligned)
    results = {**want, "out": out}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def check_index(present: Tensor, layout: PackedLayout, device: str) -> None:
    """Compare write_index and read_index with the reference; bits past the last group are set."""
    bitmap = to_bitmap(present)
    if present.shape[1] % 32 and layout.low_bits:
        bitmap[:, -1] |= torch.tensor(-1 << present.shape[1] % 32, dtype=I32)
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        index = placed(oracle.poisoned(len(bitmap), layout.index_words, dtype=I32), where, False)
        back = placed(oracle.poisoned(*bitmap.shape, dtype=I32), where, False)
        given = placed(bitmap, where, False)
        ops.write_index(given, index, layout=layout)
        ops.read_index(index, back, layout=layout)
        same("bitmap", given, bitmap)
        for tensor in (index, back):
            check_margins(tensor)
        same("bitmap read", back, to_bitmap(present))
        out.append(index)
    same("index", out[1], out[0])


def check_select(x: Tensor, threshold: Tensor, layout: PackedLayout, device: str) -> Tensor:
    """Compare select with the reference; return its bitmaps."""
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        bitmap = placed(oracle.poisoned(len(x), layout.bitmap_words, dtype=I32), where, False)
        counts = placed(oracle.poisoned(len(x), 4, dtype=I32), where, False)
        ops.select(placed(x, where, False), threshold.to(where), bitmap, counts, layout=layout)
        for tensor in (bitmap, counts):
            check_margins(tensor)
        out.append((bitmap, counts))
    for name, want, got in zip(("bitmap", "counts"), *out, strict=True):
        same(name, got, want)
    return out[0][0]

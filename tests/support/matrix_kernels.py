"""Inputs of the Triton operators of quantized matrices, and their comparison with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from support import oracle
from support.kernel_cases import canonical, check_margins, kernels, placed, same
from tagc.ops import reference
from tagc.ops.matrix import MatrixLayout

F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32


@dataclass
class Problem:
    """Arguments of quantize_matrix, on the CPU."""

    grad: Tensor
    residual: Tensor | None
    layout: MatrixLayout
    average: float = 0.0


def random(D: int, layout: MatrixLayout, rng: np.random.Generator) -> Tensor:
    """Heavy-tailed, with zeros and ties; matrices, rows and columns have scales of their own."""
    rows, columns = (torch.from_numpy(rng.normal(size=n)) for n in (layout.rows, layout.columns))
    x = oracle.values((D, layout.count, layout.rows, layout.columns), rng)
    x = x * rows.exp()[:, None] * columns.exp()
    if layout.count > 1:
        x = x * torch.from_numpy(rng.normal(size=(D, layout.count, 1, 1))).exp()
    return x.float().flatten(1)


def problem(
    bits: int,
    group: int,
    rows: int,
    columns: int,
    grad: torch.dtype = F32,
    residual: torch.dtype | None = F32,
    average: float = 0.0,
    *,
    level: float = 1.0,
    count: int = 1,
    D: int = 2,
    seed: int = 0,
) -> Problem:
    rng = np.random.default_rng([rows, columns, bits, group, seed])
    layout = MatrixLayout(
        rows=rows, columns=columns, bits=bits, group=group, level=level, count=count
    )
    return Problem(
        random(D, layout, rng).to(grad),
        None if residual is None else random(D, layout, rng).to(residual),
        layout, average,
    )  # fmt: skip


def on_edge(edge: float, rng: np.random.Generator) -> Tensor:
    """``[64, 64]``, rows whose means are within rounding of ``edge``, a float32: the order of the
    additions decides on which side of it they end."""
    unit = 2.0 ** (np.floor(np.log2(edge)) - 23)
    middle = round(edge / unit)
    near = middle + rng.integers(-(1 << 17), 1 << 17, (64, 64))
    near[:, -1] += 64 * middle - near.sum(1) + rng.integers(-64, 64, 64)
    return torch.from_numpy(near * unit).float()


def filled(x: Tensor, bits: int = 1, group: int = 1, residual: Tensor | None = None) -> Problem:
    """A given matrix for one destination; no residual means zeros."""
    residual = torch.zeros_like(x) if residual is None else residual
    layout = MatrixLayout(rows=x.shape[0], columns=x.shape[1], bits=bits, group=group)
    return Problem(x.reshape(1, -1), residual.reshape(1, -1), layout)


def quantized(ops, p: Problem, device: str, aligned: bool = False) -> dict[str, Tensor | None]:
    out = {
        "message": oracle.poisoned(p.grad.shape[0], p.layout.words, dtype=I32),
        "residual": p.residual,
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    grad = placed(p.grad, device, aligned)
    ops.quantize_matrix(
        grad, out["residual"], out["message"], layout=p.layout, average=p.average
    )  # fmt: skip
    same("gradient", grad, p.grad)
    for tensor in out.values():
        check_margins(tensor)
    return out


def check_sum(
    message: Tensor, layout: MatrixLayout, device: str, *, dtype=F32, divisor=3, aligned=False
) -> Tensor:
    """Compare dequantize_matrix ``[K, R, words]`` with the reference."""
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        result = placed(
            oracle.poisoned(message.shape[0], layout.numel, dtype=dtype), where, aligned
        )
        sent = placed(message, where, aligned)
        ops.dequantize_matrix(sent, result, layout=layout, divisor=divisor)
        same("message", sent, message)
        check_margins(result)
        out.append(result)
    same("out", canonical(out[1]), canonical(out[0]))
    return out[0]


def check(p: Problem, device: str, *, dtype=F32, divisor=3, aligned=False) -> dict[str, Tensor]:
    """Compare quantizing and adding up all messages with the reference; return the sum."""
    want = quantized(reference, p, "cpu", aligned)
    got = quantized(kernels("ops"), p, device, aligned)
    for name, tensor in want.items():
        same(name, got[name], tensor)
    message = want["message"]
    assert message is not None
    out = check_sum(message[None], p.layout, device, dtype=dtype, divisor=divisor, aligned=aligned)
    results = {**want, "out": out[0]}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def row_bytes(message: Tensor, layout: MatrixLayout) -> list[int]:
    """The bytes of one message that describe the rows."""
    first = sum(layout.head[:2])
    words = message[first : first + layout.head[2]].contiguous()
    return words.view(torch.uint8)[: layout.rows].tolist()

"""Cases for messages of matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from support import oracle
from support.marks import named, slow
from support.trials import MATRICES, RARER_MATRICES
from tagc.ops import get_ops
from tagc.ops.matrix import MatrixLayout

OPS = CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
both = pytest.mark.parametrize("ops", OPS, ids=["cpu", "reference"])
SIZES = [(1, 1), (2, 1), (1, 8)]
VARIANTS = MATRICES
RARER = RARER_MATRICES
variants = pytest.mark.parametrize(
    ("bits", "group", "grad_dtype", "residual_dtype"),
    [*VARIANTS, *(slow(*rarer) for rarer in RARER)],
    ids=lambda v: str(v).removeprefix("torch."),
)
# Hypothesis draws from these; for the CPU they are the ones compiled in float32 for `make test`.
COMPILED = [size for size in SIZES if (*size, F32, F32) in VARIANTS]
some_sizes = pytest.mark.parametrize(
    ("ops", "sizes"),
    [(REFERENCE, SIZES), (CPU, COMPILED), slow(CPU, SIZES)],
    ids=["reference", "cpu", "cpu, all"],
)
# All sizes, with gradients and residuals in float32; the CPU's kernels are compiled for some.
sizes_on_both = pytest.mark.parametrize(
    ("ops", "bits", "group"),
    [
        param if ops is REFERENCE or (*size, F32, F32) in VARIANTS else slow(*param)
        for ops in OPS
        for size in SIZES
        for param in [(ops, *size)]
    ],
    ids=named,
)
SHAPES = [(1, 1), (3, 1), (1, 33), (5, 8), (9, 40), (4, 129)]


@dataclass
class Case:
    """Arguments of a quantization."""

    grad: Tensor
    residual: Tensor | None
    layout: MatrixLayout

    @property
    def x(self) -> Tensor:
        """`[D, rows, columns]`."""
        x = self.grad.float()
        if self.residual is not None:
            x = x + self.residual.float()
        return x.unflatten(-1, (self.layout.rows, self.layout.columns))


def matrices_of(D: int, rows: int, columns: int, rng: np.random.Generator) -> Tensor:
    """Rows and columns of different magnitudes, some of them zero, others far from the rest."""
    x = oracle.values((D, rows, columns), rng).double().numpy()
    for shape, far in (((D, rows, 1), 90), ((D, 1, columns), 30)):
        octave = rng.integers(-4, 5, shape) + (rng.random(shape) < 0.1) * rng.integers(-far, far)
        x = np.ldexp(x, octave) * (rng.random(shape) > 0.1)
    return torch.from_numpy(np.clip(x, -3e38, 3e38).astype(np.float32))


def make_case(shape, D, variant, rng, *, level=1.0, spoilt=False) -> Case:
    bits, group, grad_dtype, residual_dtype = variant
    rows, columns = shape
    layout = MatrixLayout(rows=rows, columns=columns, bits=bits, group=group, level=level)
    grad = matrices_of(D, rows, columns, rng)
    residual = None
    if residual_dtype is not None:
        residual = (matrices_of(D, rows, columns, rng) / 4).to(residual_dtype).flatten(1)
    if spoilt:
        for value in (math.nan, math.inf, -math.inf, 3.4028234e38, -3.4028234e38, 1e-45, -0.0):
            grad[rng.integers(D), rng.integers(rows), rng.integers(columns)] = value
    elif grad_dtype == F16:
        grad = grad.clamp(-60000, 60000)
    return Case(
        oracle.widened(grad.to(grad_dtype).flatten(1)),
        None if residual is None else oracle.widened(residual),
        layout,
    )


def quantize(ops, case: Case, average=0.0) -> tuple[Tensor, Tensor | None]:
    """The message, and the residual afterwards."""
    residual = None if case.residual is None else oracle.widened(case.residual)
    message = oracle.poisoned(case.grad.shape[0], case.layout.words, dtype=torch.int32)
    message = oracle.widened(message)
    before = case.grad.clone()
    ops.quantize_matrix(case.grad, residual, message, layout=case.layout, average=average)
    oracle.check_margins(message, residual)
    assert oracle.same_bits(case.grad, before)
    return message, residual


def dequantize(ops, message: Tensor, layout: MatrixLayout, dtype=F32, divisor=1) -> Tensor:
    out = oracle.widened(oracle.poisoned(1, layout.numel, dtype=dtype))
    ops.dequantize_matrix(message[None], out, layout=layout, divisor=divisor)
    oracle.check_margins(out)
    return out[0]

"""Codec operators beside the plainest operations on the same tensors.

The floor of encode is reading gradient and residual and writing the residual: 12 bytes per fp32
element, exactly what ``torch.add`` of the same tensors moves. The floor of decode is writing the
shard: 4 bytes per element. Ratios are to these, in one run, on one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.timing import interleaved
from tagc.codec_plans import SLACK
from tagc.layout import plan_layout
from tagc.ops import COUNTS, get_ops
from tagc.quantize import quantization_step
from tagc.symbols import SYMBOLS


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on one input."""

    symbol: str = "int8x4"
    numel: int = 1 << 22
    density: float = 0.05
    residual: str = "float32"


CASES = (
    *(Case(density=density) for density in (0.01, 0.05, 0.2)),
    Case(residual="bfloat16"),
    *(Case(symbol=symbol) for symbol in ("int16x2", "int32x1", "float32")),
)


def run(cases: tuple[Case, ...] = CASES) -> Iterator[dict[str, Any]]:
    """Measure every case; a case whose result is wrong raises instead of reporting a time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in cases:
            yield asdict(case) | _measure(case)
    finally:
        torch.set_num_threads(threads)


def _measure(case: Case) -> dict[str, Any]:
    ops, symbol, n = get_ops("cpu"), SYMBOLS[case.symbol], case.numel
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(1, n, generator=generator)
    groups = n // symbol.lanes
    size = grad.view(groups, symbol.lanes).abs().amax(1)
    threshold = size.kthvalue(round(groups * (1 - case.density))).values[None]
    capacity = int(SLACK * case.density * groups) + 1
    layout, levels = plan_layout(n, symbol, capacity), symbol.levels(2)
    step = quantization_step(threshold, symbol, levels)

    residual = torch.zeros(1, n, dtype=getattr(torch, case.residual))
    index = torch.empty(1, layout.index_words, dtype=torch.int32)
    cells = torch.empty(1, layout.cells, dtype=symbol.dtype)
    counts, stats = torch.empty(1, COUNTS, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    seed = torch.zeros(1, dtype=torch.int32)
    out, total, spare = torch.empty(n), torch.empty(1, n), torch.zeros(1, n)

    def encode() -> None:
        ops.encode(
            grad, residual, threshold, step, seed, index, cells, counts,
            layout=layout, levels=levels, capacity=capacity,
        )  # fmt: skip

    summed = torch.empty_like(cells[0])

    def decode() -> None:
        ops.decode(index, summed, step, seed, out, None, stats, layout=layout, divisor=1)

    encode()
    summed.copy_(cells[0])
    decode()
    # What was sent and what stayed is what was there: the check that lets the times count. A
    # bfloat16 residual rounds to 8 bits, float32 cells to 24 in every addition.
    whole = out + residual[0].float()
    error = (whole - grad[0]).abs() - (grad[0].abs() * 2.0**-8 if case.residual != "float32" else 0)
    if error.max() > (0.0 if symbol.integer else 1e-4) or stats[1]:
        raise AssertionError(f"{case}: sent plus residual is not the gradient")

    def restore() -> None:
        residual.zero_()
        summed.copy_(cells[0])

    seconds = interleaved(
        {
            "encode": encode,
            "decode": decode,
            "add": lambda: torch.add(grad, spare, out=total),
            "copy": lambda: out.copy_(grad[0]),
            "zero": lambda: out.zero_(),
        },
        before=restore,
    )
    return {
        "cells": layout.cells,
        "keys": int(stats[0]),
        "milliseconds": {name: round(s * 1e3, 4) for name, s in seconds.items()},
        "encode_over_add": round(seconds["encode"] / seconds["add"], 2),
        "decode_over_copy": round(seconds["decode"] / seconds["copy"], 2),
        "decode_over_zero": round(seconds["decode"] / seconds["zero"], 2),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = (
        "| symbol | density | residual | keys | encode | / add | decode | / copy | / zero fill |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    rows = [
        f"| {r['symbol']} | {r['density']:g} | {r['residual']} | {r['keys']} "
        f"| {r['milliseconds']['encode']:.2f} ms | **{r['encode_over_add']:.2f}** "
        f"| {r['milliseconds']['decode']:.2f} ms | **{r['decode_over_copy']:.2f}** "
        f"| {r['decode_over_zero']:.1f} |"
        for r in results
    ]
    return "\n".join([head, *rows])

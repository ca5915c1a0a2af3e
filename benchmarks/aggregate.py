"""``aggregate``: how fast one process adds up the messages of N workers, as a switch or a parameter
server would (the setting of LHC, arXiv 2402.07529).

Dense gradients are added as float32, sketches of a shared 5% as integers, without decoding.
"""

from __future__ import annotations

import argparse
import copy
import functools
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tagc import CountSketch, Sketch
from tagc.ops.symbols import SYMBOLS

from .records import Record, add_output, append, machine, markdown

about = "one process that adds up the messages of many"
add_arguments = add_output

# Of LHC's benchmark.
DENSITY = 0.05
WORKERS = 4
NUMEL = 1 << 22

_ROUNDS = 7
_SYMBOL = SYMBOLS["int8x4"]


def run(args: argparse.Namespace) -> list[Record]:
    """Measure on one thread; the ways take turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    xs = [torch.randn(NUMEL) for _ in range(WORKERS)]
    messages = sketches()
    size = messages[0].index.nbytes + messages[0].cells.nbytes
    turns = [(_seconds(xs, Tensor.add_), _seconds(messages, _add)) for _ in range(_ROUNDS + 1)]
    dense, sketched = (statistics.median(took) for took in zip(*turns[1:], strict=True))
    facts = {"suite": "aggregate", "workers": WORKERS, "numel": NUMEL} | machine()
    records = [
        facts | {"way": "dense fp32", "message_bytes": xs[0].nbytes, "add_seconds": dense},
        facts | {"way": "sketch of a shared 5%, int8x4", "message_bytes": size,
                 "add_seconds": sketched},
    ]  # fmt: skip
    for record in records if args.json else []:
        append(args.json, record)
    return records


def table(records: Sequence[Record]) -> str:
    """A row for each way. Speeds are relative to dense float32."""
    dense = next(r for r in records if r["way"].startswith("dense"))
    rows = []
    for r in records:
        bits = 8 * r["message_bytes"] / r["numel"]
        speed = r["workers"] * r["numel"] / r["add_seconds"] / 1e6
        faster = dense["add_seconds"] / r["add_seconds"]
        rows.append((r["way"], f"{bits:.2f}", f"{speed:.0f}", f"{faster:.2f}×"))
    return markdown(("way", "bits", "adds, M elements/s", "to dense"), rows)


def _seconds(messages: Sequence[Any], add: Callable[[Any, Any], object]) -> float:
    total = copy.deepcopy(messages[0])
    start = time.perf_counter()
    for one in messages[1:]:
        add(total, one)
    return time.perf_counter() - start


def sketches() -> list[Sketch]:
    """Every worker's message: random levels, in groups that are the same for all workers.

    Raises:
        RuntimeError: if the decoded sum is not the exact one.
    """
    groups = NUMEL // _SYMBOL.lanes
    keys = round(DENSITY * groups)
    mask = (torch.randperm(groups) < keys).repeat_interleave(_SYMBOL.lanes)
    most = _SYMBOL.levels(WORKERS)
    quantized = [
        torch.randint(-most, most + 1, (NUMEL,), dtype=torch.int32) * mask for _ in range(WORKERS)
    ]
    codec = CountSketch(NUMEL, keys=keys, symbol="int8x4", ops="cpu")
    messages = [codec.encode(q) for q in quantized]
    total = functools.reduce(operator.add, messages)
    if not torch.equal(codec.decode(total).values, torch.stack(quantized).sum(0)):
        raise RuntimeError("not the exact sum")
    return messages


def _add(total: Sketch, one: Sketch) -> None:
    total.index.bitwise_or_(one.index)
    total.cells.add_(one.cells)

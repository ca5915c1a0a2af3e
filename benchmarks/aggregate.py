"""``aggregate``: how fast one process adds up the messages of N workers, as a switch or a parameter
server would (the setting of LHC, arXiv 2402.07529).

Dense gradients are added as float32, sketches as integers, without decoding. The sums of sketches
must be exact.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tagc import CountSketch, Sketch
from tagc.ops.symbols import SYMBOLS

from .records import Record, add_outputs, append, machine, markdown

about = "one process that adds up the messages of many"

DENSITY = 0.05  # LHC's benchmark
# All workers' gradients have this part in common; the rest is as large, and each worker's own.
_COMMON = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--workers", type=int, default=4, help="whose messages are added (default: %(default)s)")
    add("--numel", type=int, default=1 << 22, help="elements of a gradient (default: %(default)s)")
    add("--rounds", type=int, default=7, help="of each way; medians count (default: %(default)s)")
    add_outputs(parser, plots=False)


def run(args: argparse.Namespace) -> list[Record]:
    """Measure on one thread; the ways take turns."""
    torch.set_num_threads(1)
    xs = gradients(args.numel, args.workers)
    ways = {
        "dense fp32": (xs, Tensor.add_),
        "sketch of each worker's 5%, int8x4": (sketches(xs, shared=False), _add),
        "sketch of a shared 5%, int8x4": (sketches(xs, shared=True), _add),
    }
    turns = [[seconds(*way) for way in ways.values()] for _ in range(args.rounds + 1)][1:]
    records = []
    for (name, (messages, _)), took in zip(ways.items(), zip(*turns, strict=True), strict=True):
        about = {"suite": "aggregate", "way": name, "workers": args.workers, "numel": args.numel}
        first = messages[0]
        parts = (first.index, first.cells) if isinstance(first, Sketch) else (first,)
        size = {"message_bytes": sum(part.nbytes for part in parts)}
        size |= {"add_seconds": statistics.median(took)}
        records.append(machine() | about | size)
        if args.json:
            append(args.json, records[-1])
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


def seconds(messages: Sequence[Any], add: Callable[[Any, Any], object]) -> float:
    """To add up the messages."""
    total = copy.deepcopy(messages[0])
    start = time.perf_counter()
    for one in messages[1:]:
        add(total, one)
    return time.perf_counter() - start


def gradients(numel: int, workers: int) -> list[Tensor]:
    """Every worker's gradient, ``[numel]`` float32."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(numel, generator=generator)
    own = [torch.randn(numel, generator=generator) for _ in range(workers)]
    return [_COMMON * common + (1 - _COMMON) * noise for noise in own]


def sketches(xs: Sequence[Tensor], *, shared: bool) -> list[Sketch]:
    """Every worker's message.

    Args:
        shared: the first worker chooses the groups of all.

    Raises:
        RuntimeError: if the decoded sum is not the exact one.
    """
    workers, numel = len(xs), xs[0].numel()
    symbol = SYMBOLS["int8x4"]
    kept = round(DENSITY * numel / symbol.lanes)
    keys = kept if shared else min(numel // symbol.lanes, workers * kept)
    codec = CountSketch(numel, keys=keys, symbol="int8x4", ops="cpu")
    levels = min(127, symbol.levels(workers))
    quantized = [_largest(x, symbol.lanes, kept, levels, xs[0] if shared else x) for x in xs]
    messages = [codec.encode(q) for q in quantized]
    total = copy.deepcopy(messages[0])
    for one in messages[1:]:
        _add(total, one)
    if not torch.equal(codec.decode(total).values, torch.stack(quantized).sum(0)):
        raise RuntimeError("not the exact sum")
    return messages


def _add(total: Sketch, one: Sketch) -> None:
    total.index.bitwise_or_(one.index)
    total.cells.add_(one.cells)


def _largest(x: Tensor, lanes: int, kept: int, levels: int, chosen_by: Tensor) -> Tensor:
    """The groups of ``lanes`` that are the largest in ``chosen_by``, as integers; 0 elsewhere."""
    size = chosen_by.view(-1, lanes).abs().amax(1)
    mask = torch.zeros_like(size, dtype=torch.bool)
    mask[size.topk(kept).indices] = True
    q = (x * (levels / x.abs().max())).round().to(torch.int32)
    return q * mask.repeat_interleave(lanes)

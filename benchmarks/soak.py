"""``soak``: memory, density and unresolved keys over thousands of steps on 2 ranks, or on 2 hosts.

A small model trains with a codec of each kind. At regular steps every rank records its resident
memory (``/proc/self/statm``) and Python's (``tracemalloc``). Neither may grow after the first ten
steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import tracemalloc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import tagc

from .figure import Curve, Panel, draw
from .gloo import on_ranks
from .rank import Net
from .records import Record, markdown

about = "memory of training ranks over thousands of steps"

RANKS = 2
DENSITY = 0.1
_SETTLED = 10
_WIDTH, _LAYERS, _BATCH, _LENGTH = 32, 1, 2, 16
_MICRO_BATCHES = 2
_SHARED = {"kind": "sketch", "density": DENSITY, "symbol": "int16x2", "support": "shared"}
POLICY: dict[str, Any] = {
    "schema": 1,
    "gradients": [
        {"when": {"name": "*self_attn*"}, "codec": {"kind": "sketch", "density": DENSITY}},
        {"when": {"name": "*up_proj*"}, "codec": _SHARED},
        {"when": {"name": "*down_proj*"}, "codec": {"kind": "matrix", "bits": 1}},
        {"when": {"min_numel": 1}, "codec": {"kind": "quantized", "bits": 4}},
    ],
    "parameters": [{"when": {"min_numel": 1}, "codec": {"kind": "quantized", "bits": 8}}],
}
# What only hosts have: changes against a copy, gradients in 8 bits inside, micro-batches that wait.
ON_HOSTS: dict[str, Any] = POLICY | {
    "inside": "int8",
    "parameters": [
        {"when": {"name": "*mlp*"}, "codec": {"kind": "delta", "bits": 4}},
        *POLICY["parameters"],
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument(
        "--hosts", type=int,
        help="train on two hosts with this many ranks each (default: 2 ranks, no hosts)",
    )  # fmt: skip
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots there, as PNG")


def run(args: argparse.Namespace) -> int:
    """Train, print the table."""
    records = soak(args.steps, args.hosts)
    print(table(records))
    if args.plots:
        for file in plots(records, args.plots):
            print(f"wrote {file}")
    return 0


def soak(steps: int, hosts: int | None = None) -> list[Record]:
    """Train on 2 ranks, or on 2 hosts of so many ranks; return one record per rank."""
    return on_ranks(_train, RANKS * (hosts or 1), steps, hosts, minutes=2)


def _train(rank: int, steps: int, hosts: int | None) -> Record:
    torch.manual_seed(0)
    model: Any = Net(_WIDTH, _LAYERS)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model this small may send more when compressed
        tagc.wrap(model, POLICY if hosts is None else ON_HOSTS, hosts=hosts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(rank)
    every = max(1, steps // 200)
    noted: dict[str, list[float]] = {"step": [], "resident": [], "traced": []}
    tracemalloc.start()
    for step in range(1, steps + 1):
        for left in reversed(range(1 if hosts is None else _MICRO_BATCHES)):
            if hosts is not None:
                model.set_requires_all_reduce(left == 0)
            start = torch.randint(len(text) - _LENGTH, (_BATCH, 1), generator=draw)
            model(text[start + torch.arange(_LENGTH)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == _SETTLED or step % every == 0:
            # Cycles that wait for collection are no growth.
            gc.collect()
            noted["step"].append(step)
            noted["resident"].append(_resident())
            noted["traced"].append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    metrics = tagc.compressor(model).metrics()
    counted = ("steps", "density_target", "density", "unresolved")
    return {"rank": rank, **{name: getattr(metrics, name) for name in counted}, **noted}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(record: Record, what: str) -> float:
    """Bytes by which the last value exceeds the one after the first ten steps."""
    settled = record["step"].index(_SETTLED)
    return record[what][-1] - record[what][settled]


def table(records: Sequence[Record]) -> str:
    """One row per rank."""
    head = ["rank", "steps", "resident", "grown", "held by Python", "grown", "density", "target"]
    rows = (
        (
            r["rank"],
            r["steps"],
            f"{r['resident'][-1] / 2**20:.1f} MiB",
            f"{growth(r, 'resident') / 2**10:+.0f} KiB",
            f"{r['traced'][-1] / 2**10:.0f} KiB",
            f"{growth(r, 'traced') / 2**10:+.1f} KiB",
            f"{r['density']:.4f}",
            f"{r['density_target']:.4f}",
            r["unresolved"],
        )
        for r in records
    )
    return markdown([*head, "unresolved"], rows)


def plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """The memory curves."""

    def panel(what: str, unit: int, label: str) -> Panel:
        curves = [
            Curve(
                label=f"rank {r['rank']}",
                x=r["step"],
                y=[value / unit for value in r[what]],
                style={"marker": ""},
            )
            for r in records
        ]
        return Panel(x="step", y=label, curves=curves, from_zero=True)

    panels = [
        panel("resident", 2**20, "resident memory, MiB"),
        panel("traced", 2**10, "held by Python (tracemalloc), KiB"),
    ]
    return [draw(panels, folder / "soak-memory.png")]

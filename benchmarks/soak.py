"""``soak``: memory, density and unresolved keys over thousands of steps on 2 ranks, or on 2 hosts.

A small transformer trains with a codec for every matrix of a layer. At regular steps every rank
records its resident memory (``/proc/self/statm``) and Python's (``tracemalloc``). Neither may grow
after the first ten steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import tracemalloc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import tagc

from .figure import Curve, Panel, draw
from .gloo import join
from .records import Record, markdown

__all__ = ["about", "add_arguments", "plots", "run", "soak", "table"]

about = "memory of training ranks over thousands of steps"

RANKS = 2
SETTLED = 10
_WIDTH, _LAYERS, _BATCH, _LENGTH = 32, 1, 2, 16
DENSITY = 0.1
# Attention and half of each MLP are sketched, the rest is quantized.
POLICY: dict[str, Any] = {
    "schema": 1,
    "gradients": [
        {
            "when": {"name": "*self_attn*.*weight"},
            "codec": {"kind": "sketch", "density": DENSITY},
        },
        {
            "when": {"name": "*linear2.weight"},
            "codec": {
                "kind": "sketch",
                "density": DENSITY,
                "symbol": "int16x2",
                "support": "shared",
            },
        },
        {"when": {"min_numel": 1}, "codec": {"kind": "quantized", "bits": 4}},
    ],
    "parameters": [{"when": {"min_numel": 1}, "codec": {"kind": "quantized", "bits": 8}}],
}


# What only hosts have: changes against a copy, gradients in 8 bits inside, micro-batches that wait.
ON_HOSTS: dict[str, Any] = POLICY | {
    "inside": "int8",
    "parameters": [
        {"when": {"name": "*linear*.weight"}, "codec": {"kind": "delta", "bits": 4}},
        *POLICY["parameters"],
    ],
}
_MICRO_BATCHES = 2


class Net(nn.Module):
    """A small transformer that classifies every token."""

    def __init__(self, width: int, layers: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[B * T, vocabulary]`` of tokens ``[B, T]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument(
        "--hosts",
        type=int,
        help="train on two hosts with this many ranks each (default: 2 ranks, no hosts)",
    )
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
    ranks = RANKS * (hosts or 1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(ranks, steps, folder, hosts), nprocs=ranks)
        return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(ranks)]


def _rank(rank: int, ranks: int, steps: int, folder: str, hosts: int | None) -> None:
    join(rank, ranks, folder, minutes=2)
    torch.manual_seed(0)
    model: Any = Net(_WIDTH, _LAYERS)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model this small may send more when compressed
        tagc.wrap(model, POLICY if hosts is None else ON_HOSTS, hosts=hosts)
    record = _train(model, rank, steps, hosts)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def _train(model: Any, rank: int, steps: int, hosts: int | None) -> Record:
    micro_batches = 1 if hosts is None else _MICRO_BATCHES
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(rank)
    every = max(1, steps // 200)
    noted: dict[str, list[float]] = {"step": [], "resident": [], "traced": []}
    tracemalloc.start()
    for step in range(1, steps + 1):
        for left in reversed(range(micro_batches)):
            if hosts is not None:
                model.set_requires_all_reduce(left == 0)
            start = torch.randint(len(text) - _LENGTH, (_BATCH, 1), generator=draw)
            tokens = text[start + torch.arange(_LENGTH)]
            loss = nn.functional.cross_entropy(model(tokens), tokens.roll(-1, 1).flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == SETTLED or step % every == 0:
            # Cycles that wait for collection are no growth.
            gc.collect()
            noted["step"].append(step)
            noted["resident"].append(_resident())
            noted["traced"].append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    metrics = tagc.compressor(model).metrics()
    return {
        "rank": rank,
        "steps": metrics.steps,
        "density_target": metrics.density_target,
        "density": metrics.density,
        "unresolved": metrics.unresolved,
        **noted,
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(record: Record, what: str) -> float:
    """Bytes by which the last value exceeds the one after the first ten steps."""
    settled = record["step"].index(SETTLED)
    return record[what][-1] - record[what][settled]


def table(records: Sequence[Record]) -> str:
    """One row per rank."""
    head = ["rank", "steps", "resident", "grown", "held by Python", "grown", "density", "target"]
    rows = [
        [
            r["rank"],
            r["steps"],
            f"{r['resident'][-1] / 2**20:.1f} MiB",
            f"{growth(r, 'resident') / 2**10:+.0f} KiB",
            f"{r['traced'][-1] / 2**10:.0f} KiB",
            f"{growth(r, 'traced') / 2**10:+.1f} KiB",
            f"{r['density']:.4f}",
            f"{r['density_target']:.4f}",
            r["unresolved"],
        ]
        for r in records
    ]
    return markdown([*head, "unresolved"], rows)


def plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """The memory curves."""
    panels = [
        Panel(
            x="step",
            y=label,
            curves=[
                Curve(
                    label=f"rank {r['rank']}",
                    x=r["step"],
                    y=[value / unit for value in r[what]],
                    style={"marker": ""},
                )
                for r in records
            ],
            from_zero=True,
        )
        for what, unit, label in (
            ("resident", 2**20, "resident memory, MiB"),
            ("traced", 2**10, "held by Python (tracemalloc), KiB"),
        )
    ]
    return [draw(panels, folder / "soak-memory.png")]

"""``fsdp2``: training steps on two ranks that share one device through gloo: dense beside tagc.

Whether the step works there, what the loss does and what a step takes. gloo stages CUDA tensors
through host memory and both ranks share one GPU, so times compare only with each other.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tagc

from .gloo import join
from .records import Record, append, markdown, read

about = "training steps of FSDP2 on one GPU, dense beside tagc"

_RANKS = 2
_UNTIMED = 3
_POLICY = {
    "schema": 1,
    "gradients": [
        {
            "when": {"min_numel": 4096},
            "codec": {"kind": "sketch", "density": 0.05, "symbol": "int8x4"},
            "feedback": {"kind": "residual", "dtype": "bfloat16"},
        },
        {"when": {}, "codec": {"kind": "dense"}},
    ],
}


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


def train(kind: str, device: torch.device) -> dict[str, Any]:
    """A few steps on one batch; losses, and the median time of a step in milliseconds. The kernels
    are those that tagc takes by itself, compiled and checked in ``tagc.wrap``, whose seconds are
    there, too. On a CPU, which only rehearses this, the model is tiny."""
    small = device.type == "cpu"
    width, layers, batch, length, steps = (64, 2, 2, 16, 4) if small else (512, 4, 8, 128, 15)
    torch.manual_seed(0)
    model = Net(width, layers).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wrap_s = 0.0
    if kind == "tagc":
        start = time.perf_counter()
        model = tagc.wrap(model, _POLICY)
        wrap_s = time.perf_counter() - start
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (batch, length), generator=draw).to(device)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(tokens), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": [round(x, 3) for x in losses],
        "step_ms": round(1e3 * statistics.median(seconds[_UNTIMED:]), 2),
        "first_step_ms": round(1e3 * seconds[0], 1),
    }
    if kind == "tagc":
        metrics = tagc.compressor(model).metrics()
        result |= {
            # Kernels that other parts compiled are in Triton's cache.
            "wrap_s": round(wrap_s, 2),
            "density": round(metrics.density, 4),
            "unresolved": metrics.unresolved,
            "bytes_saved": round(metrics.dense_bytes / metrics.wire_bytes, 2),
        }
    return result


def problem_with(result: dict[str, Any]) -> str | None:
    """Why a run is not what training should look like; None if it is."""
    losses = result["losses"]
    if not all(map(math.isfinite, losses)):
        return "the loss is not finite"
    if losses[-1] >= losses[0]:
        return f"the loss did not fall: {losses[0]} to {losses[-1]}"
    if result.get("unresolved"):
        return f"{result['unresolved']} groups were unresolved"
    return None


def _rank(rank: int, kind: str, device_type: str, folder: str) -> None:
    if device_type == "cuda":
        torch.cuda.set_device(0)
    join(rank, _RANKS, folder, minutes=1 if device_type == "cuda" else 5)
    try:
        result = train(kind, torch.device(device_type))
        if rank == 0:
            append(Path(folder) / "result.jsonl", result)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def attempt(kind: str, device: str) -> Record:
    """A run's result, or why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_rank, args=(kind, device, folder), nprocs=_RANKS)
            (result,) = read([Path(folder) / "result.jsonl"])
        except Exception as raised:  # goes into the report; the other run is tried all the same
            traceback.print_exc()
            return {"run": kind, "wrong": str(raised).strip().splitlines()[-1]}
    return {"run": kind, **result, "wrong": problem_with(result)}


def table(records: Sequence[Record]) -> str:
    """A row for each run."""
    keys = ["run", "parameters", "wrap_s", "step_ms", "first_step_ms", "density", "bytes_saved",
            "unresolved", "losses", "wrong"]  # fmt: skip
    return markdown(keys, ([r.get(key, "-") for key in keys] for r in records))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses a tiny model"
    )


def run(args: argparse.Namespace) -> int:
    """Both runs, print the table; 0 if both trained."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu rehearses the runs", file=sys.stderr)
        return 2
    results = [attempt(kind, args.device) for kind in ("dense", "tagc")]
    print(
        f"{_RANKS} ranks on one {args.device} device, gloo: every message goes through host "
        f"memory, so times only compare with each other.\n\n{table(results)}"
    )
    return 1 if any(result["wrong"] for result in results) else 0

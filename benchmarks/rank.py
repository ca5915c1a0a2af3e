"""``rank``: training steps of one rank of a large model on one device, FSDP2 beside tagc.

A single GPU shows what compression costs a rank, without a network: the rank has its shards of a
model of several billion parameters, its own batch, and the buffers that it would send and receive,
in full size. Nothing is sent: a collective copies this rank's own data to where the other ranks'
would arrive. So losses say nothing, and the time of a step is that of all except the network.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import tagc

from .llama import Llama
from .one_device import alone
from .records import Record, add_output, machine, markdown, measured

about = "one rank's steps of a large model on one device, without the network"

DENSE = "FSDP2"
CAPTURED = ", captured"
_POLICIES = ("hybrid", "loco-4bit", "one-bit", "attn-only", "thrifty")
RANKS = 8
_TIMED = 5


def decoder(width: int = 4096, layers: int = 32) -> Llama:
    """With the default sizes, a model of 7 billion parameters."""
    sizes = {"vocabulary": width * 125 // 16, "inner": width * 43 // 16}
    return Llama(width=width, layers=layers, heads=max(4, width // 128), plain=True, **sizes)


def sharded(device: torch.device, width: int = 4096, layers: int = 2) -> nn.Module:
    """The model, in bfloat16 with shards in float32; each rank has its own only. On a CPU it is
    tiny, with ``layers``."""
    with torch.device("meta"):
        model = decoder(128, layers) if device.type == "cpu" else decoder(width)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            assert isinstance(p, DTensor)
            shard = p.to_local()
            shard.fill_(1.0) if p.ndim == 1 else shard.normal_(0, 0.02)
    return model


def wrap(model: nn.Module, policy: str) -> None:
    """Wrap the model with a policy, past its warm-up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tiny model's units may send more when compressed
        tagc.wrap(model, policy, hosts=1)
    for reducer in tagc.compressor(model).reducers:
        reducer.counters.steps = reducer.plan.warmup_steps


def train(name: str, device: torch.device, tokens: int, settle: int, width: int) -> Record:
    """Medians of a few steps, after ``settle`` others, with a sequence of ``tokens``; ``name`` is a
    policy of tagc, or :data:`DENSE`. With :data:`CAPTURED` after it, forward and backward are
    replays of a CUDA graph."""
    policy = name.removesuffix(CAPTURED)
    cuda = device.type == "cuda"
    model = sharded(device, width)
    found: Record = {}
    if policy != DENSE:
        start = time.perf_counter()
        wrap(model, policy)
        found["wrap_s"] = round(time.perf_counter() - start, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(256, (1, tokens), device=device)
    handle = None if policy == DENSE else tagc.compressor(model)
    graph = None
    synchronize = partial(torch.cuda.synchronize, device) if cuda else lambda: None

    def step() -> tuple[float, float]:
        """Seconds until it is done, and until the host has started everything."""
        synchronize()
        start = time.perf_counter()
        if graph is None:
            model(batch, batch).backward()
        else:
            if handle is not None:
                handle.before_replay()
            graph.replay()
        optimizer.step()
        optimizer.zero_grad(set_to_none=policy == name)  # a graph adds to the same gradients
        started = time.perf_counter() - start
        synchronize()
        return time.perf_counter() - start, started

    for _ in range(settle):
        step()
    if policy != name:
        captured = torch.cuda.CUDAGraph()
        if handle is not None:
            handle.before_capture()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            model(batch, batch).backward()
        captured.replay()
        graph = captured
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = 0 if handle is None else handle.metrics().wire_bytes
    times = [step() for _ in range(_TIMED)]
    if handle is not None:
        sent = handle.metrics().wire_bytes - before
        found["gradients_gib"] = round(sent / _TIMED / 2**30, 2)
    done, started = (1e3 * statistics.median(part) for part in zip(*times, strict=True))
    found |= {"step_ms": round(done, 1), "host_ms": round(started, 1)}
    if cuda:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 1)
        found |= _kernels(step)
    return found


def _kernels(step: Any) -> Record:
    """What a step starts on a GPU: all of it, and tagc's kernels, by name."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        step()
    seen = [e for e in profiled.key_averages() if e.self_device_time_total > 0]
    folder = files("tagc.triton_kernels").iterdir()
    sources = [f.read_text() for f in folder if f.name.endswith(".py")]
    names = re.findall(r"^def (\w+_kernel)\(", "\n".join(sources), re.MULTILINE)
    ours = sorted((e for e in seen if e.key in names), key=lambda e: -e.self_device_time_total)
    return {
        "started": sum(e.count for e in seen),
        "tagc_started": sum(e.count for e in ours),
        "tagc_ms": round(sum(e.self_device_time_total for e in ours) / 1e3, 1),
        "kernels": {e.key: [e.count, round(e.self_device_time_total / 1e3, 2)] for e in ours[:8]},
    }


def table(records: Sequence[Record]) -> str:
    """A row for each run, and below it what the kernels of each take."""
    keys = ["policy", "step_ms", "to dense", "host_ms", "started", "tagc_started", "tagc_ms",
            "peak_gib", "gradients_gib", "wrap_s"]  # fmt: skip
    dense = next((r["step_ms"] for r in records if r["policy"] == DENSE), None)
    rows, notes = [], []
    for r in records:
        ratio = {"to dense": f"{r['step_ms'] / dense:.3f}"} if dense and "step_ms" in r else {}
        rows.append([(r | ratio).get(key, "-") for key in keys])
        if r.get("kernels"):
            parts = (f"{k} x{n} {ms} ms" for k, (n, ms) in r["kernels"].items())
            notes.append(f"- {r['policy']}: {', '.join(parts)}")
        if "failed" in r:
            notes.append(f"- {r['policy']} failed: {r['failed']}")
    return "\n".join([markdown(keys, rows), "", *notes])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses a tiny model")
    add("--tokens", type=int, default=4096, help="of a step (default: %(default)s)")
    add("--width", type=int, default=4096, help="of the model on a GPU, a multiple of 128")
    add("--settle", type=int, default=8, help="steps before; default: %(default)s")
    add("--captured", action="store_true", help="run each one also as replays of a CUDA graph")
    add("--policies", nargs="+", default=_POLICIES, metavar="POLICY", help="default: %(default)s")
    add_output(parser)


def run(args: argparse.Namespace) -> list[Record]:
    """A run without tagc first and last, the policies between them."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --device cpu rehearses the runs")
    if args.captured and device.type != "cuda":
        raise ValueError("a CPU captures no CUDA graph: leave out --captured")
    facts = {"suite": "rank", "ranks": RANKS, "tokens": args.tokens, "width": args.width}

    def run_of(name: str) -> Record:
        with alone(RANKS):
            return train(name, device, args.tokens, args.settle, args.width)

    ways = ("", CAPTURED) if args.captured else ("",)
    names = [name + way for name in (DENSE, *args.policies, DENSE) for way in ways]
    runs = ((name, partial(run_of, name)) for name in names)
    return measured("policy", runs, facts | machine(device), args.json)

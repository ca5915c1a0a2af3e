"""``untuned``: the loss of every policy on the first try, with a dense run's settings.

nanoGPT's model for CPUs and its optimizer train under real FSDP2 on 2 ranks, and nothing but the
policy changes: the learning rate and the limit for clipping are dense's. With ``--tuned`` both are
multiplied by the factors that the policy names (``tuning``), with ``--kept`` tagc sees to them
(:meth:`tagc.Compressor.keep_rates`). It also says by how much the norm of what the optimizer gets
exceeds dense's, which is what clipping sees.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import tagc

from .gloo import join
from .machine import machine
from .records import Record, append, markdown, read

__all__ = ["about", "add_arguments", "plots", "run", "table"]

about = "loss of every policy at dense's own learning rate and clipping, nanoGPT's model, 2 ranks"

_EXAMPLES = Path(__file__).parents[1] / "examples"
_RANKS = 2
_HELD_OUT = 256
_DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One training run: a policy with the settings of a dense one, or its own."""

    policy: str
    seed: int
    steps: int
    rate: float
    clip: float
    kept: bool = False

    @property
    def key(self) -> Record:
        """All that the result depends on, but for machine and versions; records of before there was
        ``kept`` are of runs without."""
        return {k: v for k, v in vars(self).items() if k != "kept" or v}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--policies", default=",".join(tagc.policies()), help="names or files, with commas")
    add("--steps", type=int, default=150)
    add("--seeds", type=int, default=3)
    add("--rate", type=float, default=1e-3, help="dense's learning rate (default: nanoGPT's)")
    add("--clip", type=float, default=1.0, help="limit of the gradient's norm, for dense")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--tuned", action="store_true", help="multiply both by the factors that a policy names"
    )
    how.add_argument("--kept", action="store_true", help="let tagc keep both, as for dense")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        default=Path("runs/untuned.jsonl"),
        help="results, a line each; runs that are in it are not made again (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the runs that are missing, print the table."""
    names = [_DENSE, *(n for n in args.policies.split(",") if n != _DENSE)]
    jobs = [_job(name, seed, args) for seed in range(args.seeds) for name in names]
    found = read([args.json]) if args.json.exists() else []
    made = [r["run"] for r in found if r.get("suite") == "untuned"]
    missing = [job for job in jobs if job.key not in made]
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(missing, folder, args.json), nprocs=_RANKS)
    keys = [job.key for job in jobs]
    print(table([r for r in read([args.json]) if r["run"] in keys]))
    return 0


def _job(name: str, seed: int, args: argparse.Namespace) -> _Job:
    tuning = tagc.Policy.load(name).tuning if args.tuned else None
    rate_factor, norm_factor = (
        (tuning.rate_factor, tuning.norm_factor or 1.0) if tuning else (1.0, 1.0)
    )
    return _Job(
        policy=name,
        seed=seed,
        steps=args.steps,
        rate=args.rate * rate_factor,
        clip=args.clip * norm_factor,
        kept=args.kept and name != _DENSE,
    )


def _rank(rank: int, jobs: Sequence[_Job], folder: str, file: Path) -> None:
    join(rank, _RANKS, folder, minutes=10)
    facts = {"suite": "untuned"} | machine()
    for job in jobs:
        record = facts | {"run": job.key} | _train(job, rank)
        if rank == 0:
            append(file, record)
            print(f"{job.policy}: seed {job.seed}: {record['loss']:.4f}", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


def _model(seed: int) -> Any:
    """nanoGPT's for CPUs: 4 layers of width 128, 64 tokens, weights of 0.02, embedding and head
    the same parameter."""
    gpt = _example("gpt")
    config = gpt.GPTConfig(context=64, width=128, layers=4, heads=4)
    torch.manual_seed(seed)
    model = gpt.GPT(config)
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            last = name.endswith("c_proj.weight")
            nn.init.normal_(p, std=0.02 / (math.sqrt(2 * config.layers) if last else 1))
    model.lm_head.weight = model.transformer.wte.weight
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


def _train(job: _Job, rank: int) -> Record:
    corpus = _example("text").load_corpus()
    model = _model(job.seed)
    length = model.config.context
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so small a model may cost more compressed
        tagc.wrap(model, job.policy)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=job.rate, betas=(0.9, 0.99))
    compressor = tagc.compressor(model)
    if job.kept:
        compressor.keep_rates(optimizer)
    norms: list[float] = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.rate * _schedule(step, job.steps)
        tokens, targets = corpus.batch(12, length, seed=job.seed, step=step, rank=rank)
        model(tokens, targets).backward()
        if job.kept:
            norms.append(compressor.clip_grad_norm_(job.clip).item())
        else:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = model(*corpus.held_out(_HELD_OUT, length, rank=rank, ranks=_RANKS)) / _RANKS
    dist.all_reduce(loss)
    metrics = compressor.metrics()
    compressor.remove()
    return {
        "loss": loss.item(),
        "norms": [float(f"{n:.4g}") for n in norms],
        **({"noise_factor": round(metrics.noise_factor, 3)} if job.kept else {}),
        "wire_bytes": metrics.wire_bytes,
        "dense_bytes": metrics.dense_bytes,
    }


def _schedule(step: int, steps: int) -> float:
    """A tenth of the steps to warm up, then a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _example(name: str) -> Any:
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    return importlib.import_module(name)


def table(records: Sequence[Record]) -> str:
    """A row for a policy with its settings: means over seeds."""
    found: dict[tuple[str, float, float, bool], list[Record]] = {}
    for r in records:
        run = r["run"]
        key = (run["policy"], run["rate"], run["clip"], run.get("kept", False))
        found.setdefault(key, []).append(r)
    dense = {r["run"]["seed"]: r for r in records if r["run"]["policy"] == _DENSE}
    rows = []
    for (name, rate, clip, kept), mine in found.items():
        losses = [r["loss"] for r in mine]
        pairs = [(r, dense[r["run"]["seed"]]) for r in mine if r["run"]["seed"] in dense]
        gaps = [r["loss"] / d["loss"] - 1 for r, d in pairs]
        clips = [sum(n > clip for n in r["norms"]) / len(r["norms"]) for r in mine]
        rows.append(
            [
                name,
                f"{rate:g}{' kept' if kept else ''}",
                f"{clip:g}",
                f"{statistics.fmean(losses):.4f}",
                f"{max(losses) - min(losses):.4f}",
                len(losses),
                f"{statistics.fmean(gaps):+.1%}" if gaps and name != _DENSE else "",
                f"{statistics.fmean(_norm_ratio(*p) for p in pairs):.2f}" if pairs else "",
                f"{statistics.fmean(clips):.0%}",
            ]
        )
    head = ["policy", "rate", "clip", "loss", "range", "seeds", "to dense", "norm", "clipped"]
    return markdown(head, rows)


def plots(results: Sequence[Record], folder: Path) -> list[Path]:
    """None: the table says it all."""
    return []


def _norm_ratio(record: Record, dense: Record) -> float:
    """Mean norm of the gradients to dense's, in the second half of the steps, past any warm-up."""
    half = len(record["norms"]) // 2
    return statistics.fmean(record["norms"][half:]) / statistics.fmean(dense["norms"][half:])

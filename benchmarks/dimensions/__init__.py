"""``dimensions``: losses and step times of models split over tensor, pipeline, expert parallelism.

| file | idea |
|---|---|
| ``model.py`` | a transformer that can be split |
| ``training.py`` | one rank of a run |
| ``worker.py`` | a rank's process on a slow link |
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options import add_outputs
from ..records import Record, append, markdown, read

if TYPE_CHECKING:
    from .training import Job

about = "losses, and times on slow links, with tensor, pipeline and expert parallelism"

_LOSSES = "pp 2; tp 2; ep 2; pp 2, tp 2"
_METHODS = "dense; 8 bits; 4 bits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--layouts", default=_LOSSES, help="ranks by dimension: 'pp 2, dp 2, tp 2; tp 2'")
    add(
        "--methods",
        default=_METHODS,
        help="dense, bf16 (between stages), '8 bits', '4 bits, stochastic', 'all hard' (gradients "
        "in half a bit, activations in 4), or a policy",
    )
    add("--seeds", type=int, default=3, help="pairs of each line")
    add("--steps", type=int, default=600, help="of a run whose loss is measured")
    add("--rate", help="measure steps on links of this rate instead of losses: 100mbit; needs root")
    add("--timed", type=int, default=8, help="steps that are timed, with --rate")
    add_outputs(parser, "runs/dimensions.jsonl")


def run(args: argparse.Namespace) -> int:
    """Make the runs that are missing, and print the tables."""
    for job in _jobs(args):
        facts = {"suite": "dimensions"} | ({"link": args.rate} if args.rate else {})
        about = facts | job.key
        known = read([args.json]) if args.json.exists() else []
        if any(about.items() <= record.items() for record in known):
            continue
        from ..machine import machine

        record = _timed(job, args.rate) if args.rate else _trained(job)
        append(args.json, machine() | about | record)
        said = f"{record['loss']:.4f}" if "loss" in record else f"{record['seconds']:.3f} s"
        print(f"{job.key['layout']}, {job.method}, seed {job.seed}: {said}", file=sys.stderr)
    print(table(read([args.json])))
    return 0


def policy_of(method: str) -> Any:
    """The policy of a method; None for torch's own groups."""
    if method in ("dense", "bf16"):
        return None
    if method == "all hard":
        hard = policy_of("4 bits")
        return {"schema": 1, "extends": "half-bit", "dimensions": hard["dimensions"]}
    bits, _, rest = method.partition(" ")
    if rest not in ("bits", "bits, stochastic"):
        return method
    codec: dict[str, Any] = {"kind": "quantized", "bits": int(bits), "block": 64}
    if rest.endswith("stochastic"):
        codec["rounding"] = "stochastic"
    rule = {"codec": codec}
    return {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
        "dimensions": dict.fromkeys(("pp", "tp", "ep"), rule),
    }


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    from .model import Size
    from .training import Job

    for seed in range(1 if args.rate else args.seeds):
        for text in args.layouts.split(";"):
            layout = {}
            for part in text.split(","):
                name, ranks = part.split()
                layout[name] = int(ranks)
            for method in args.methods.split(";"):
                job = Job(
                    layout=layout,
                    method=method.strip(),
                    policy=policy_of(method.strip()),
                    steps=args.steps,
                    seed=seed,
                    size=Size(experts=4 if "ep" in layout else 0),
                )
                yield replace(job, timed=args.timed) if args.rate else job


def _trained(job: Job) -> Record:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(job, folder), nprocs=job.ranks)
        return json.loads((Path(folder) / "record").read_text())


def _rank(rank: int, job: Job, folder: str) -> None:
    import torch.distributed as dist

    from ..gloo import join
    from .training import train

    join(rank, job.ranks, folder, minutes=30)
    record = train(job)
    if rank == 0:
        (Path(folder) / "record").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def _timed(job: Job, rate: str) -> Record:
    from ..network.launch import run as run_ranks
    from ..network.namespaces import Network, Rate

    with tempfile.TemporaryDirectory() as folder, Network(job.ranks) as network:
        network.limit(Rate.parse(rate))
        said = json.dumps(asdict(job) | {"layout": dict(job.layout)})
        command = [sys.executable, "-m", f"{__name__}.worker", said, f"{folder}/record"]
        if run_ranks(network, command):
            raise RuntimeError(f"a rank of {job.key['layout']}, {job.method} failed")
        return json.loads(Path(f"{folder}/record").read_text())


def table(records: Sequence[Record]) -> str:
    """The tables, as Markdown."""
    losses = [r for r in records if "loss" in r]
    timed = [r for r in records if "seconds" in r]
    tables = ([_losses(losses)] if losses else []) + ([_times(timed)] if timed else [])
    return "\n\n".join(tables)


def _losses(records: Sequence[Record]) -> str:
    from ..quality.intervals import difference

    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for r in records:
        found.setdefault((r["layout"], r["steps"], r["method"]), {})[r["seed"]] = r["loss"]
    rows = []
    for (layout, steps, method), losses in found.items():
        mean = sum(losses.values()) / len(losses)
        beside: Mapping[int, float] = found.get((layout, steps, "dense"), {})
        to = difference(losses, beside) if method != "dense" else None
        rows.append((layout, steps, method, f"{mean:.4f}", len(losses), to or ""))
    return markdown(("layout", "steps", "activations", "loss", "seeds", "to dense"), rows)


def _times(records: Sequence[Record]) -> str:
    rows = []
    for r in records:
        alike = [o for o in records if o["layout"] == r["layout"] and o["link"] == r["link"]]
        bf16 = next((o for o in alike if o["method"] == "bf16"), None)
        rows.append(
            (
                r["link"],
                r["layout"],
                r["method"],
                f"{r['seconds']:.3f}",
                "" if bf16 is None else f"{bf16['seconds'] / r['seconds']:.2f}",
                f"{r['interface_bytes'] / 1e6:.2f}",
                "" if bf16 is None else f"{r['interface_bytes'] / bf16['interface_bytes']:.3f}",
            )
        )
    head = (
        "link",
        "layout",
        "activations",
        "s a step",
        "bf16's time to it",
        "MB a step",
        "to bf16",
    )
    return markdown(head, rows)

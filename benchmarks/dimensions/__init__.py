"""``dimensions``: losses and step times of models split over tensor, pipeline, expert parallelism.

``model.py`` is a transformer that can be split, ``training.py`` one rank of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

from ..gloo import on_ranks
from ..network.launch import Network
from ..quality.report import difference
from ..records import Record, add_outputs, append, machine, markdown, read
from .model import Size
from .training import Job, train

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


def run(args: argparse.Namespace) -> list[Record]:
    """Make the runs that are missing."""
    for job in _jobs(args):
        link = {"link": args.rate} if args.rate else {}
        about = {"suite": "dimensions"} | link | job.key
        known = read([args.json]) if args.json.exists() else []
        if any(about.items() <= record.items() for record in known):
            continue
        if args.rate:
            with Network(job.ranks, rate=args.rate) as network:
                record = network.on_ranks(train, 0, job)
        else:
            record = on_ranks(train, job.ranks, job)[0]
        append(args.json, machine() | about | record)
        found = f"{record['loss']:.4f}" if "loss" in record else f"{record['seconds']:.3f} s"
        print(f"{job.key['layout']}, {job.method}, seed {job.seed}: {found}", file=sys.stderr)
    return read([args.json])


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    for seed in range(1 if args.rate else args.seeds):
        for text in args.layouts.split(";"):
            layout = {}
            for part in text.split(","):
                name, ranks = part.split()
                layout[name] = int(ranks)
            for method in args.methods.split(";"):
                yield Job(
                    layout=layout,
                    method=method.strip(),
                    steps=args.steps,
                    seed=seed,
                    size=Size(experts=4 if "ep" in layout else 0),
                    timed=args.timed if args.rate else 0,
                )


def table(records: Sequence[Record]) -> str:
    """The tables, as Markdown."""
    losses = [r for r in records if "loss" in r]
    timed = [r for r in records if "seconds" in r]
    tables = ([_losses(losses)] if losses else []) + ([_times(timed)] if timed else [])
    return "\n\n".join(tables)


def _losses(records: Sequence[Record]) -> str:
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
    bf16 = {(r["layout"], r["link"]): r for r in records if r["method"] == "bf16"}
    rows = []
    for r in records:
        row = [r["link"], r["layout"], r["method"], f"{r['seconds']:.3f}"]
        beside = bf16.get((r["layout"], r["link"]))
        row.append(f"{beside['seconds'] / r['seconds']:.2f}" if beside else "")
        row.append(f"{r['interface_bytes'] / 1e6:.2f}")
        row.append(f"{r['interface_bytes'] / beside['interface_bytes']:.3f}" if beside else "")
        rows.append(row)
    head = ["link", "layout", "activations", "s a step", "bf16's time to it", "MB a step"]
    return markdown([*head, "to bf16"], rows)

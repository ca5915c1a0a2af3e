"""``gpu``: everything that is worth knowing about a GPU, by one command, in under eight minutes.

Parts, each a process of its own with a time limit: the GPU tests, what the kernels compile to, the
kernel benchmark, and training steps of FSDP2 on two ranks that share the GPU. A part that fails
or hangs takes nothing from the others; ``report.md`` is written anew after each of them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import torch

from tagc.plots import PlotsUnavailableError

from .. import kernels
from ..machine import machine
from ..records import append, read
from .parts import Part, Running, parts
from .report import write_report

about = "GPU tests, compile table, kernel benchmark and training steps: one report"
_LIMIT = 460.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for all results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu rehearses the programme: everything small, and the implementation for CPUs",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="PART", help="tests, compile, kernels, fsdp2")


def run(args: argparse.Namespace) -> int:
    """Run all parts; 0 if all of them passed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu rehearses the programme", file=sys.stderr)
        return 2
    out: Path = args.out
    if out.exists() and any(out.iterdir()):
        print(f"{out} is not empty", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    todo = parts(args.device, out)
    if args.only:
        unknown = set(args.only) - {part.name for part in todo}
        if unknown:
            print(f"unknown part: {', '.join(sorted(unknown))}", file=sys.stderr)
            return 2
        todo = [part for part in todo if part.name in args.only]
    return _run(todo, args.device, out)


def _run(todo: list[Part], device: str, out: Path) -> int:
    deadline = time.monotonic() + _LIMIT
    facts = machine(device) | {"command": f"python -m benchmarks gpu --device {device}"}
    finished: dict[str, dict] = {}

    def finish(running: Running) -> None:
        outcome = running.finish(deadline)
        finished[running.part.name] = outcome
        append(out / "parts.jsonl", {"suite": "gpu"} | facts | outcome)
        _keep_log(out, running)
        if running.part.name == "kernels":
            _draw(out)
        write_report(out, facts, todo, finished)
        print(f"{running.part.name}: {outcome['status']}, {outcome['seconds']} s", flush=True)

    write_report(out, facts, todo, finished)
    started = [Running(part, out) for part in todo if part.background]
    background = list(started)
    try:
        for part in todo:
            if not part.background:
                started.append(Running(part, out))
                finish(started[-1])
        for running in background:
            finish(running)
    finally:  # also of an interrupt, which does not reach processes in sessions of their own
        for running in started:
            running.kill()
    print(f"written to {out}: report.md")
    return 0 if all(o["status"] == "passed" for o in finished.values()) else 1


def _draw(out: Path) -> None:
    """The plots of what a benchmark measured that was stopped before it drew them."""
    file = out / "kernels.jsonl"
    if file.exists() and not list(out.glob("kernels-*.png")):
        try:
            kernels.plots(read([file]), out)
        except PlotsUnavailableError as error:
            print(error, file=sys.stderr)


def _keep_log(out: Path, running: Running) -> None:
    """All logs in one file: what fetches results from elsewhere may limit their number."""
    with (out / "log.txt").open("a") as log:
        log.write(f"==== {running.part.name}: {' '.join(running.part.command)}\n")
        with running.log.open() as text:
            shutil.copyfileobj(text, log)
    running.log.unlink()

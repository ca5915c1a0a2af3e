"""Real ranks that share a GPU train GPT-2 small's shape, in a limited time.

Every line trains as many steps as the time allows all of them, at the uncompressed run's settings.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tagc.handle import readiness

from .. import tokens
from ..gloo import on_ranks
from ..one_device import Memory, through_memory
from ..records import Record, append, machine
from .methods import DENSE, Method
from .runs import losses_of, results_of
from .settings import GPT2, GPT2_RECIPE, Run, Shape
from .training import train

POLICIES = ("hybrid", "one-bit", "thrifty")
_REHEARSAL = Shape(width=32, layers=2, heads=1, context=32, batch=2, vocabulary=512, tied=True)
# Of the time, for what a trial does not show.
_SPARE = 0.06
_TRIAL = 24  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this comparison, besides its outputs."""
    add = parser.add_argument
    add("--text", type=Path, help="made by benchmarks.tokens; default: Python's library")
    add("--policies", nargs="+", default=POLICIES, metavar="POLICY", help="%(default)s")
    add("--seconds", type=float, default=570, help="for everything (default: %(default)s)")
    add("--steps", type=int, help="of every line, whatever time that takes")
    add("--seeds", type=int, default=1, help="runs of each line (default: %(default)s)")
    add("--batch", type=int, default=GPT2.batch, help="sequences a rank (default: %(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses a tiny model")
    add("--through", choices=("device", "host"), default="device", help="memory of the messages")


def run(args: argparse.Namespace) -> None:
    """Make the runs that are missing.

    Raises:
        ValueError: without a GPU, or without the file of the text.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --device cpu rehearses the runs")
    if args.text and not args.text.is_file():
        raise ValueError(f"no such file: {args.text}; python -m benchmarks.tokens makes one")
    args.started = time.time()
    args.shape = replace(GPT2, batch=args.batch) if args.device == "cuda" else _REHEARSAL
    through = torch.device("cpu" if args.through == "host" else args.device)
    memory = Memory(args.shape.ranks, 4 * _parameters(args.shape) + 2**20, through)
    on_ranks(_rank, args.shape.ranks, memory, args, minutes=6)


def _parameters(shape: Shape) -> int:
    """At most."""
    rows = shape.vocabulary + shape.context + shape.layers * (12 * shape.width + 4) + 2
    return rows * shape.width


def lines(policies: Sequence[str], shape: Shape, steps: int, seed: int) -> list[Run]:
    """The uncompressed run and one for each policy, all at GPT-2 small's usual rate."""
    methods = [DENSE, *(Method(name=name, policy=name) for name in policies)]
    small = {"windows": 8, "evaluations": 4} if shape == _REHEARSAL else {}
    recipe = replace(GPT2_RECIPE, **small)
    return [
        Run(
            method=method,
            shape=shape,
            steps=steps,
            rate=6e-4,
            seed=seed,
            recipe=replace(recipe, kept=method.policy is not None),
        )
        for method in methods
    ]


def _rank(rank: int, memory: Memory, args: argparse.Namespace) -> None:
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    corpus = tokens.load(args.text) if args.text else None
    if corpus and int(corpus.train.max()) >= args.shape.vocabulary:
        raise ValueError(
            f"{args.text} has more tokens than a vocabulary of {args.shape.vocabulary}"
        )
    source = corpus.source if corpus else "the standard library's source files, in words"
    results = results_of("gpu", args.json)
    with (
        through_memory(memory, rank, device),
        # Ranks that share a GPU check for long, and `make gpu` has checked.
        patch.object(readiness, "check", return_value="not checked"),
    ):
        steps = [args.steps or _steps(args, device, corpus)]
        dist.broadcast_object_list(steps)
        if steps[0] < 1:
            raise ValueError(f"{args.seconds:g} s are too few for a step of each line")
        for seed in range(args.seeds):
            for run in lines(args.policies, args.shape, steps[0], seed):
                if losses_of(results)(run) is None:
                    facts = machine(device) | {"text": source, "method": run.method.name}
                    found = _trained(run, device, corpus, args, noted=rank == 0)
                    results.add(run.key, facts | found, write=rank == 0)


def _trained(
    run: Run, device: torch.device, corpus: Any, args: argparse.Namespace, *, noted: bool
) -> Record:
    """A record. Each loss is written as soon as it is known: the time may end at any moment."""
    file = args.json.with_suffix(".curves.jsonl")

    def note(step: int, loss: float, seconds: float) -> None:
        if noted:
            said = {"method": run.method.name, "steps": run.steps, "seed": run.seed, "step": step}
            append(file, said | {"loss": round(loss, 5), "seconds": round(seconds, 2)})
            took = time.time() - args.started
            print(f"{took:5.0f} s  {said} {loss:.4f}", file=sys.stderr, flush=True)

    found = _train(run, device, corpus, note)
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return found


def _train(run: Run, device: torch.device, corpus: Any, note: Any) -> Record:
    # The line before leaves its memory to this one, and to the other ranks.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return train(run, device, corpus, note)


def _steps(args: argparse.Namespace, device: torch.device, corpus: Any) -> int:
    """How many steps the rest of the time allows each line, by a trial of each."""
    fixed = each = 0.0
    for run in lines(args.policies, args.shape, _TRIAL, 0):
        marks: dict[int, float] = {}
        since = time.perf_counter()
        _train(run, device, corpus, lambda step, loss, at, marks=marks: marks.update({step: at}))
        took = time.perf_counter() - since
        first = min(step for step in marks if step >= _TRIAL // 2)
        step = (marks[_TRIAL] - marks[first]) / (_TRIAL - first)
        fixed += took - _TRIAL * step
        each += step
        if dist.get_rank() == 0:
            text = f"{run.method.name}: {1e3 * step:.0f} ms a step, {took:.0f} s in all"
            print(text, file=sys.stderr, flush=True)
    left = args.started + args.seconds * (1 - _SPARE) - time.time()
    return int((left / args.seeds - fixed) / each)

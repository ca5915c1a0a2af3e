"""Which runs each comparison needs, and the ranks that make them.

A comparison is a function that yields the runs that can start now, the most useful first, given the
losses so far. All ranks see the same losses, so they choose the same next run; rank 0 writes the
records. An interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tagc.handle import collectives

from .. import tokens
from ..gloo import on_ranks
from ..one_device import Memory, through_memory
from ..records import Record, Results, append, machine
from .methods import DENSE, GRID, Method, method_of
from .report import difference
from .settings import GPT2, GPT2_RECIPE, Recipe, Run, Setting, Shape
from .training import train

Losses = Callable[[Run], float | None]
"""The loss of a finished run: infinite if it diverged, None if it has not been made."""
Comparison = Callable[[Losses], Iterator[Run]]

_NARROW = 0.003  # relative to the loss


def sweep_runs(
    losses: Losses, *, methods: Sequence[str], seeds: int, max_rates: int = 6, **given: Any
) -> Iterator[Run]:
    """Every method at its own best rate.

    Args:
        seeds: the first one sweeps the rates, the others train at the best.
        max_rates: end a sweep after this many rates, wherever the best is.
        given: what all runs share, ``shape`` and ``steps``.
    """
    later: list[Run] = []
    for method in map(method_of, methods):

        def run(rate: float, seed: int = 0, method: Method = method) -> Run:
            return Run(method=method, rate=rate, seed=seed, **given)

        missing, best = sweep(run, method.rates, max_rates, losses)
        yield from missing
        if best is not None:
            later += [run(best, seed) for seed in range(1, seeds)]
    yield from (run for run in later if losses(run) is None)


def paired_runs(
    losses: Losses,
    *,
    settings: Sequence[Setting],
    lines: Sequence[str],
    kept: bool,
    seeds: tuple[int, int],
) -> Iterator[Run]:
    """Lines beside dense, seed by seed, at dense's best rate.

    Args:
        lines: if none, each setting's own.
        kept: whether tagc keeps the optimizer's rates.
        seeds: the fewest and the most pairs of a line; more than the fewest while half of an
            interval is wider than ``_NARROW``.
    """
    for setting in settings:

        def uncompressed(rate: float, seed: int = 0, setting: Setting = setting) -> Run:
            return setting.run(setting.dense, rate * setting.unit, seed, kept=False)

        missing, best = sweep(uncompressed, setting.rates, setting.max_rates, losses)
        yield from missing
        if best is None:
            continue
        dense = [uncompressed(best, seed) for seed in range(seeds[1])]
        paired = []
        for method in map(method_of, lines or setting.lines):
            how = {"rate": best * setting.unit, "kept": kept and method.policy is not None}
            paired.append([setting.run(method, seed=seed, **how) for seed in range(seeds[1])])
        for seed in range(seeds[1]):
            wide = [m for m in paired if seed < seeds[0] or _half(m, dense, losses) > _NARROW]
            runs = [mine[seed] for mine in (dense, *wide)] if wide else []
            yield from (run for run in runs if losses(run) is None)


def _half(mine: Sequence[Run], dense: Sequence[Run], losses: Losses) -> float:
    """Of the interval of the pairs that are there."""
    made = ({r.seed: losses(r) for r in runs} for runs in (mine, dense))
    interval = difference(*({s: x for s, x in of.items() if x is not None} for of in made))
    return math.inf if interval is None else interval.half


def every(methods: Iterable[Method], seeds: int, *, recipe: Recipe, **given: Any) -> list[Run]:
    """A run of each seed and method; with a policy, tagc keeps the rates."""
    kept = replace(recipe, kept=True)
    return [
        Run(method=method, recipe=recipe if method.policy is None else kept, seed=seed, **given)
        for seed in range(seeds)
        for method in methods
    ]


def listed_runs(losses: Losses, *, runs: Sequence[Run]) -> Iterator[Run]:
    """Runs that depend on no other."""
    yield from (run for run in runs if losses(run) is None)


def sweep(
    run: Callable[[float], Run], start: Sequence[float], most: int, losses: Losses
) -> tuple[list[Run], float | None]:
    """Try rates until the best one lies between two others.

    Args:
        start: the first rates, neighbours in ``GRID``.
        most: end after this many.

    Returns:
        The runs that are still needed; when none is, the best rate.
    """
    rates = list(start)
    while True:
        found = {rate: losses(run(rate)) for rate in rates}
        if missing := [run(rate) for rate, loss in found.items() if loss is None]:
            return missing, None
        best = min(rates, key=lambda rate: found[rate] or 0.0)
        first, last = GRID.index(rates[0]), GRID.index(rates[-1])
        if len(rates) < most and best == rates[0] and first > 0:
            rates.insert(0, GRID[first - 1])
        elif len(rates) < most and best == rates[-1] and last + 1 < len(GRID):
            rates.append(GRID[last + 1])
        else:
            return [], best


def results_of(comparison: str, file: Path) -> Results:
    """The runs of one comparison in a file."""
    return Results(file, "run", {"suite": "quality", "comparison": comparison})


def losses_of(results: Results) -> Losses:
    """See ``Losses``."""

    def loss(run: Run) -> float | None:
        if (found := results.get(run.key)) is None:
            return None
        return math.inf if found["loss"] is None else found["loss"]

    return loss


def make(
    name: str, comparison: Comparison, file: Path, train: Callable[[Run], Record] = train
) -> None:
    """Make all runs that are missing, each on its own number of ranks."""
    while run := next(comparison(losses_of(results_of(name, file))), None):
        on_ranks(_make_alike, run.shape.ranks, name, comparison, file, train)


def _make_alike(
    rank: int, name: str, comparison: Comparison, file: Path, train: Callable[[Run], Record]
) -> None:
    """Make runs as long as the next one wants this many ranks."""
    results = results_of(name, file)
    dist.barrier()  # all have read the file before anyone writes
    while run := next(comparison(losses_of(results)), None):
        if run.shape.ranks != dist.get_world_size():
            break
        found: list[Record] = [machine() | {"method": run.method.name} | train(run)]
        dist.broadcast_object_list(found)  # so that all ranks choose by the same loss
        (record,) = found
        if name != "untuned":  # no other table has norms
            record.pop("norms", None)
        results.add(run.key, record, write=rank == 0)
        if rank == 0:
            about = f"{run.method.name}: {run.steps} steps, rate {run.rate:g}, seed {run.seed}"
            loss = "diverged" if record["loss"] is None else f"{record['loss']:.4f}"
            sent = f"{record['bits']:.2f} bits, {record['step_ms']:.0f} ms a step"
            print(f"{about}: {loss}, {sent}", file=sys.stderr, flush=True)


_GPU = ("hybrid", "one-bit", "thrifty")
_REHEARSAL = Shape(width=32, layers=2, heads=1, context=32, batch=2, vocabulary=512, tied=True)


def on_gpu(args: argparse.Namespace) -> None:
    """Make the runs that are missing, on ranks that share a GPU: uncompressed and with each policy,
    all at GPT-2 small's usual rate.

    Raises:
        ValueError: without a GPU, or without the file of the text.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --device cpu rehearses the runs")
    if args.text and not args.text.is_file():
        raise ValueError(f"no such file: {args.text}; python -m benchmarks.tokens makes one")
    shape, recipe = GPT2, GPT2_RECIPE
    if args.device == "cpu":
        shape, recipe = _REHEARSAL, replace(GPT2_RECIPE, windows=8, evaluations=4)
    methods = [DENSE, *(Method(name=name, policy=name) for name in _GPU)]
    given = {"shape": shape, "steps": args.steps, "rate": 6e-4, "recipe": recipe}
    rows = shape.vocabulary + shape.context + shape.layers * (12 * shape.width + 4) + 2
    # A message has a float for each parameter at most.
    memory = Memory(shape.ranks, 4 * rows * shape.width + 2**20, torch.device(args.device))
    runs = partial(listed_runs, runs=every(methods, 1, **given))
    make("gpu", runs, args.json, partial(_on_device, memory=memory, args=args))


def _on_device(run: Run, memory: Memory, args: argparse.Namespace) -> Record:
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    corpus = tokens.load(args.text) if args.text else None
    if corpus and int(corpus.train.max()) >= run.shape.vocabulary:
        raise ValueError(f"{args.text} has more tokens than {run.shape.vocabulary}")
    source = corpus.source if corpus else "the standard library's source files, in words"
    # The line before leaves its memory to this one, and to the other ranks.
    gc.collect()
    torch.cuda.empty_cache()
    note = partial(_note, args.json.with_suffix(".curves.jsonl"), run)
    rank = dist.get_rank()
    with (
        through_memory(memory, rank, device),
        # Ranks that share a GPU check for long, and `make gpu` has checked.
        patch.object(collectives, "check", return_value="not checked"),
    ):
        found = train(run, device, corpus, note if rank == 0 else None)
    return machine(device) | {"text": source} | found


def _note(file: Path, run: Run, step: int, loss: float, seconds: float) -> None:
    """Write a loss as soon as it is known: the time may end at any moment."""
    record = {"method": run.method.name, "steps": run.steps, "seed": run.seed, "step": step}
    append(file, record | {"loss": round(loss, 5), "seconds": round(seconds, 2)})
    print(f"{seconds:5.0f} s  {record} {loss:.4f}", file=sys.stderr, flush=True)

"""Bits an element that codec ``exact`` sends at several learning rates, counted at the collectives:
messages as they were sent, with what fills up to the longest rank's, and the exchange of sizes.

One model trains at each of :data:`TRAINING`, the last one goes on at each of :data:`TUNING`, at a
constant rate, on text that it has not seen. Gradients are uncompressed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import tagc
from examples.text import load_corpus

from ..gloo import clip
from ..network import ledger
from ..records import Results, machine
from .methods import DENSE, Method, method_of
from .settings import Recipe, Run, Shape
from .training import distributed, factor, make_model, make_optimizers

TRAINING = (3e-3, 3e-4)
TUNING = (1e-5, 1e-6)
SHAPE = Shape(width=160, heads=5, context=128, ranks=2)
_EXACT = method_of("dense, exact changes")
_RECIPE = Recipe(half=True)


def measure(rank: int, steps: int, results: Results) -> None:
    """As one of the ranks, make all runs, unless the file has them."""
    keys = {rate: _run(_EXACT, steps, rate).key for rate in (*TRAINING, *TUNING)}
    for rate in TUNING:
        keys[rate]["after"] = TRAINING[-1]
    if all(map(results.get, keys.values())):
        return
    ledger.install()
    dense = _run(DENSE, 1, TRAINING[0])
    about = machine() | {
        "parameters": sum(p.numel() for p in make_model(dense).parameters()),
        "native_bits": _train(dense)[0][0],
        "native_bits_kept": _train(dense, reshard=False)[0][0],
    }
    weights = None
    for rate, key in keys.items():
        bits, ended = _train(_run(_EXACT, steps, rate), weights if rate in TUNING else None)
        if rate in TRAINING:
            weights = ended
        results.add(key, about | {"bits": [round(b, 4) for b in bits]}, write=rank == 0)
        if rank == 0:
            print(f"rate {rate:g}: {statistics.fmean(bits):.3f} bits", file=sys.stderr, flush=True)


def _run(method: Method, steps: int, rate: float) -> Run:
    return Run(method=method, shape=SHAPE, steps=steps, rate=rate, recipe=_RECIPE)


def _train(
    run: Run, start: Mapping[str, Any] | None = None, *, reshard: bool = True
) -> tuple[list[float], Mapping[str, Any]]:
    """What the all-gathers about each step send to another rank, in bits an element of the sender's
    shard; and the weights at the end. ``start``: weights to fine-tune."""
    corpus, ranks = load_corpus(), dist.get_world_size()
    model = distributed(make_model(run), run)
    if start is not None:
        model.load_state_dict(start)
        corpus = replace(corpus, train=corpus.validation)
    if not reshard:
        model.set_reshard_after_forward(False)
    if run.method.policy is not None:
        tagc.wrap(model, run.method.policy)
    (optimizer,) = make_optimizers(model, run.recipe, run.rate)
    numel = sum(p.numel() for p in model.parameters()) / ranks
    bits: list[float] = []
    # The first forward gathers parameters whole; those after a step say what it changed.
    for step in range(run.steps + 1):
        ledger.tally(reset=True)
        batch = corpus.batch(
            run.shape.batch, run.shape.context, seed=run.seed, step=step, rank=dist.get_rank()
        )
        model(*batch).backward()
        bits.append(8 * ledger.tally().payload[ledger.PARAMETERS] / (numel * (ranks - 1)))
        clip(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            share = 1.0 if start is not None else factor(step, run.steps, run.recipe.floor)
            group["lr"] = run.rate * share
        optimizer.step()
        optimizer.zero_grad()
    return bits[1:], model.state_dict()

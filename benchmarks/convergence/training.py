"""One training run on simulated ranks."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tagc.noise import KeptRates, clip_grad_norm
from tagc.policy import Policy

from ..records import Record
from .copies import SimulatedCopies
from .methods import Method
from .ranks import SimulatedRanks
from .recipe import FIRST, Recipe
from .words import in_words

_EXAMPLES = Path(__file__).parents[2] / "examples"
_HELD_OUT = 256
_CHUNK = 256
BYTES = 256
_EVALUATIONS = 10


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and its batches; the default has 0.87 M parameters.

    Attributes:
        vocabulary: of bytes; more are words (:mod:`.words`).
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    ranks: int = 4
    batch: int = 8
    vocabulary: int = BYTES

    @property
    def key(self) -> dict[str, Any]:
        """What differs; records from before there were words know of none."""
        mine = dict(vars(self))
        return {k: v for k, v in mine.items() if k != "vocabulary" or v != BYTES}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A method at a learning rate."""

    method: Method
    shape: Shape
    steps: int
    rate: float
    seed: int
    recipe: Recipe = FIRST

    @property
    def key(self) -> Record:
        """All that the result depends on, but for the machine; the name is not part of it."""
        m = self.method
        return {
            "codec": m.codec,
            "feedback": m.feedback,
            "average": m.average,
            "betas": list(m.betas),
            **self.shape.key,
            "steps": self.steps,
            "rate": self.rate,
            "seed": self.seed,
            **({"parameters": m.parameters, "gathered": m.gathered} if m.parameters else {}),
            **self.recipe.key,
        }


def train(run: Run, device: str = "cpu") -> Record:
    """Train and validate.

    Returns:
        ``loss`` (nats per token on held-out text, the mean of the recipe's last evaluations; None
        if it diverged), ``losses`` by step, on fewer windows but for those last ones,
        ``bits`` per compressed element, ``bits_with_warmup``, ``step_ms``; ``parameter_bits`` where
        parameters are compressed.
    """
    with _one_thread():
        return _train(run, torch.device(device))


def _train(run: Run, device: torch.device) -> Record:
    shape = run.shape
    gpt, corpus = _example("gpt"), _corpus(shape.vocabulary)
    config = gpt.GPTConfig(
        vocab=shape.vocabulary,
        context=shape.context,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
    )
    torch.manual_seed(run.seed)
    model = gpt.GPT(config).to(device)
    policy = Policy.load(run.method.policy) if run.method.policy else None
    ranks = SimulatedRanks(model, policy, shape.ranks)
    copies = None
    if policy is not None and policy.parameters:
        copies = SimulatedCopies(model, policy, shape.ranks, getattr(torch, run.method.gathered))
    recipe = run.recipe
    optimizers = recipe.optimizers(model, run.rate, run.method.betas[0])
    schedules = [recipe.schedule(optimizer, run.steps) for optimizer in optimizers]
    last = recipe.last_evaluations(run.steps)
    if recipe.kept:
        ranks.measure_noise()
        for optimizer in optimizers:
            KeptRates(optimizer, ranks, second_moment=None)
    averages = [torch.zeros_like(p) for p in model.parameters()] if run.method.average else []
    losses: dict[int, float] = {}
    seconds = 0.0
    for step in range(run.steps):
        started = time.perf_counter()
        with copies.in_place() if copies else nullcontext():
            for rank in range(shape.ranks):
                model.zero_grad()
                batch = corpus.batch(
                    shape.batch, shape.context, seed=run.seed, step=step, rank=rank
                )
                _loss(model, batch, device).backward()
                ranks.take(rank)
        ranks.average()
        for p, average in zip(model.parameters(), averages, strict=bool(averages)):
            assert p.grad is not None
            p.grad.copy_(average.lerp_(p.grad, run.method.average))
        if recipe.clip is not None and recipe.kept:
            clip_grad_norm(model, ranks, recipe.clip)
        elif recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if copies:
            copies.note_step()
        seconds += time.perf_counter() - started
        done = step + 1
        if done in last or done * _EVALUATIONS // run.steps != step * _EVALUATIONS // run.steps:
            windows = recipe.windows if done in last else _HELD_OUT
            with copies.in_place() if copies else nullcontext():
                losses[done] = _validate(model, corpus, device, windows)
            if not math.isfinite(losses[done]):
                break
    ended = [losses[step] for step in last if step in losses] or [losses[done]]
    loss = math.fsum(ended) / len(ended) if done == run.steps else math.inf
    dense = min(ranks.warmup_steps, run.steps)
    # What is not compressed is float32; with nothing compressed, all of it.
    bits = ranks.compressed_bits / ranks.compressed if ranks.compressed else 32.0
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits": bits,
        "bits_with_warmup": (32 * dense + bits * (run.steps - dense)) / run.steps,
        **({"parameter_bits": copies.bits / copies.elements} if copies else {}),
        "loss": loss if math.isfinite(loss) else None,
        "losses": {str(s): round(x, 5) for s, x in losses.items() if math.isfinite(x)},
        "step_ms": round(1e3 * seconds / done, 1),
    }


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    tokens, targets = (t.to(device) for t in batch)
    return model(tokens, targets)


@torch.no_grad()
def _validate(model: Any, corpus: Any, device: torch.device, windows: int) -> float:
    tokens, targets = corpus.held_out(windows, model.config.context, rank=0, ranks=1)
    chunk = max(1, _CHUNK * BYTES // model.config.vocab)  # logits take memory
    losses = [
        _loss(model, batch, device).item() * len(batch[0])
        for batch in zip(tokens.split(chunk), targets.split(chunk), strict=True)
    ]
    return math.fsum(losses) / len(tokens)


@cache
def _corpus(vocabulary: int) -> Any:
    corpus = _example("text").load_corpus()
    return corpus if vocabulary == BYTES else in_words(corpus, vocabulary)


def _example(name: str) -> Any:
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    return importlib.import_module(name)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

"""Gradients of several simulated ranks: batches of the demo's GPT at the same weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_EXAMPLES = Path(__file__).parents[2] / "examples"
_BATCH = 8
_RATE = 2e-3
# What the shipped policies compress: matrices of at least as many elements.
_LEAST = 16384


def rank_gradients(ranks: int, *, steps: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Gradients of every rank's own batch, by parameter, after training for some steps.

    The model trains on the mean of as many batches as fit one step of the demo (2 ranks of 8);
    then each rank's batch gives a gradient at the same weights, as in data-parallel training.
    Residuals of error feedback are not in it.

    Args:
        steps: of AdamW before the gradients are taken.
    """
    gpt, text = _example("gpt"), _example("text")
    torch.manual_seed(seed)
    model = gpt.GPT(gpt.GPTConfig())
    corpus = text.load_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95))

    def backward(size: int, step: int, rank: int) -> None:
        model.zero_grad()
        tokens, targets = corpus.batch(size, model.config.context, seed=seed, step=step, rank=rank)
        model(tokens, targets).backward()

    for step in range(steps):
        backward(2 * _BATCH, step, 0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = []
    for rank in range(ranks):
        backward(_BATCH, steps, rank)
        found.append(
            {
                name: p.grad.clone()
                for name, p in model.named_parameters()
                if p.grad is not None and p.ndim > 1 and p.numel() >= _LEAST
            }
        )
    return found


def times_selected(gradients: list[dict[str, Tensor]], group: int, density: float) -> Tensor:
    """How many ranks select each group, int64: every rank the largest of every matrix."""
    counts = []
    for name in gradients[0]:
        total = torch.zeros(gradients[0][name].numel() // group, dtype=torch.int64)
        kept = max(1, round(density * len(total)))
        for gradient in gradients:
            flat = gradient[name].flatten()[: len(total) * group]
            size = flat.view(-1, group).abs().amax(1)
            total[size.topk(kept).indices] += 1
        counts.append(total)
    return torch.cat(counts)


def _example(name: str) -> Any:
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    return importlib.import_module(name)

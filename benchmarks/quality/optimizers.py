"""Optimizers that the comparisons train with, over the shards of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Recipe

Betas = tuple[float, float]


def make_optimizers(model: nn.Module, recipe: Recipe, rate: float) -> list[torch.optim.Optimizer]:
    """The recipe's optimizer; a second one where Muon takes only the matrices of the blocks."""
    return OPTIMIZERS[recipe.optimizer](model, rate, (0.9, recipe.beta2))


def factor(step: int, steps: int, floor: float) -> float:
    """The rate's share in a step: a tenth of the steps to warm up, then a cosine to ``floor``."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * progress))


def _groups(parameters: Sequence[nn.Parameter], decay: float = 0.1) -> list[dict[str, Any]]:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw(model: nn.Module, rate: float, betas: Betas) -> list[torch.optim.Optimizer]:
    groups = _groups([*model.parameters()])
    fused = groups[0]["params"][0].is_cuda or None
    return [torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)]


def _muon(model: nn.Module, rate: float, betas: Betas) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for the rest, at one rate."""
    named = dict(model.named_parameters())
    hidden = {n: p for n, p in named.items() if ".h." in n and p.ndim == 2}
    rest = [p for n, p in named.items() if n not in hidden]
    muon = torch.optim.Muon(
        [*hidden.values()], lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(_groups(rest), lr=rate, betas=betas)]


def _sgd(model: nn.Module, rate: float, betas: Betas) -> list[torch.optim.Optimizer]:
    """With momentum; rates are larger than Adam's, so the decay that they multiply is smaller."""
    groups = _groups([*model.parameters()], decay=0.1 * 3e-4)
    return [torch.optim.SGD(groups, lr=rate, momentum=betas[0])]


def _lion(model: nn.Module, rate: float, betas: Betas) -> list[torch.optim.Optimizer]:
    return [Lion(_groups([*model.parameters()]), lr=rate)]


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float, betas: Betas = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum: Tensor = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - second)


OPTIMIZERS: dict[str, Callable[[nn.Module, float, Betas], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "muon": _muon,
    "sgd": _sgd,
    "lion": _lion,
}

"""How a run trains and is judged, beside its method: optimizer, clipping, schedule, evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

_LAST_PART = 0.04  # of the steps: where a rate that decays to zero moves the loss no more


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that is the same for the methods of a comparison.

    Attributes:
        optimizer: a name in ``OPTIMIZERS``.
        beta2: of Adam's second moment.
        clip: limit for the norm of the gradient; None for none.
        floor: of the cosine, as a share of the rate.
        windows: of held-out text, evenly spaced, the same for all runs.
        kept: the optimizer's rates, and the limit, stay what they are for dense gradients
            (:meth:`tagc.Compressor.keep_rates`).
        averaged: evaluations over the last 4% of the steps whose mean is the loss.
    """

    optimizer: str = "adamw"
    beta2: float = 0.95
    clip: float | None = 1.0
    floor: float = 0.1
    windows: int = 256
    averaged: int = 1
    kept: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """What differs from the first recipe, so that records which do not know of any are its."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in mine.items() if v != getattr(FIRST, k)}

    def optimizers(
        self, model: nn.Module, rate: float, momentum: float
    ) -> list[torch.optim.Optimizer]:
        """One, or two where Muon takes the matrices of the blocks."""
        return OPTIMIZERS[self.optimizer](model, rate, (momentum, self.beta2))

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        """A tenth of the steps to warm up, then a cosine down to the floor."""
        warm_up = max(1, steps // 10)

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            progress = (step - warm_up) / max(1, steps - warm_up)
            return self.floor + (1 - self.floor) / 2 * (1 + math.cos(math.pi * progress))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def last_evaluations(self, steps: int) -> list[int]:
        """The steps after which the loss counts."""
        apart = _LAST_PART * steps / max(1, self.averaged - 1)
        return sorted({max(1, round(steps - i * apart)) for i in range(self.averaged)})


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _adamw(
    model: nn.Module, rate: float, betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(_groups(list(model.parameters())), lr=rate, betas=betas)]


def _muon(model: nn.Module, rate: float, betas: tuple[float, float]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for the rest, at one rate."""
    named = dict(model.named_parameters())
    hidden = [p for n, p in named.items() if ".h." in n and p.ndim == 2]
    rest = [p for n, p in named.items() if not (".h." in n and p.ndim == 2)]
    muon = torch.optim.Muon(hidden, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(_groups(rest), lr=rate, betas=betas)]


def _sgd(model: nn.Module, rate: float, betas: tuple[float, float]) -> list[torch.optim.Optimizer]:
    """With momentum; the decay, which is multiplied by the rate, is that of the others."""
    groups = _groups(list(model.parameters()))
    for group in groups:
        group["weight_decay"] *= 3e-4
    return [torch.optim.SGD(groups, lr=rate, momentum=betas[0])]


def _lion(model: nn.Module, rate: float, betas: tuple[float, float]) -> list[torch.optim.Optimizer]:
    return [Lion(_groups(list(model.parameters())), lr=rate)]


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        for group, p in self._with_gradients():
            first, second = group["betas"]
            state = self.state[p]
            momentum: Tensor = state.setdefault("momentum", torch.zeros_like(p))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=group["lr"])
            momentum.lerp_(p.grad, 1 - second)

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for group in self.param_groups:
            yield from ((group, p) for p in group["params"] if p.grad is not None)


OPTIMIZERS: dict[
    str, Callable[[nn.Module, float, tuple[float, float]], list[torch.optim.Optimizer]]
] = {"adamw": _adamw, "muon": _muon, "sgd": _sgd, "lion": _lion}

FIRST = Recipe()
"""Of the records made before there were several."""

PAIRED = Recipe(floor=0.0, windows=2048, averaged=3)
"""For comparisons seed by seed: at the end the rate is zero, and the held-out set is large."""

"""Backwards that reach a part of the parameters, stale gradients and warm-ups, with DDP and
`replicate`: what is handed out plus what is owed is what came in, parameter by parameter.

The gradient of every parameter is the data that its loss multiplies, so that no other code says
what came in."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.nn.parallel import DistributedDataParallel

from support.distributed import on_ranks
from support.layouts import kept
from support.small_net import local
from support.states import QUANTIZED, SKETCH, wrapped
from support.units import gathered

STEPS, WARM = 8, 3
SHAPES = {"a": (13, 8), "b": (3, 2, 2, 3), "c": (5, 9), "few": (1, 40), "bias": (7,)}


class Parts(nn.Module):
    """Parameters of which every forward takes some.

    Args:
        odd: whether DDP has to do with complex numbers, gaps in memory orders and nothing at all.
    """

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        if odd:
            self.b = nn.Parameter(self.b.to(memory_format=torch.channels_last))
            self.wave = nn.Parameter(torch.zeros(6, 5, dtype=torch.complex64))

    def forward(self, data: Mapping[str, Tensor]) -> Tensor:
        """The data of the parameters that it takes."""
        losses = [(self.get_parameter(name) * of.conj()).real.sum() for name, of in data.items()]
        return torch.stack(losses).sum()


class Books:
    """The accounts of one model on this rank."""

    def __init__(self, how: str, ranks: int, hosts: int | None) -> None:
        self.replicated = how == "replicate"
        model = Parts(odd=not self.replicated)
        warm = SKETCH | {"warmup_steps": WARM}  # of the whole unit
        rules = [
            {"when": {"name": names}, "codec": codec, "feedback": {"kind": "residual"}}
            for names, codec in ((["a"], QUANTIZED), (["b", "few"], warm))
        ]
        options: dict[str, Any] = {"bucket_cap_mb": 0.0005, how: True}
        whole = replicate(model) if self.replicated else DistributedDataParallel(model, **options)
        self.model = wrapped({"schema": 1, "gradients": rules}, whole, hosts=hosts)
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.ranks, self.partly, self.left_alone = ranks, 0, 0

    def taken(self, rank: int, step: int) -> list[str]:
        """The parameters that this rank's forward takes: DDP lets ranks differ."""
        names = [name for name in self.params if name != "empty"]
        draw = random.Random(step)
        names = draw.sample(names, draw.randrange(2, len(names)))
        return names if self.replicated else names[rank % 2 :]

    def owed(self) -> dict[str, Tensor]:
        """What all ranks owe, in float64: owners owe averages."""
        mine = kept(self.model, SHAPES)
        found = {}
        for name in SHAPES:
            total = torch.zeros(SHAPES[name], dtype=torch.float64)
            for kind, worth in (("residual", 1), ("owner_residual", self.ranks)):
                if (key := f"{kind}.gradients.{name}") in mine:
                    total = total + worth * mine[key][1]
            found[name] = gathered(total).sum(0)
        return found

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: local(param.grad).detach().clone() if param.grad is not None else zeros(param)
            for name, param in self.params.items()
        }

    def step(self, rank: int, step: int, *, stale: bool, twice: bool) -> None:
        """One or two backwards, of which the last one reduces."""
        if not stale:
            self.model.zero_grad()
        before, owed = self.gradients(), self.owed()
        none = {name for name, param in self.params.items() if param.grad is None}
        new = {name: zeros(param) for name, param in self.params.items()}
        used = torch.zeros(len(self.params))
        for micro in range(1 + twice):
            reduces = micro == twice
            data = {}
            for name in self.taken(rank, 10 * step + micro):
                data[name] = torch.randn_like(new[name])
                new[name] += data[name]
                used[list(self.params).index(name)] = 1
            if self.replicated:
                self.model.set_requires_gradient_sync(reduces)
            with nullcontext() if self.replicated or reduces else self.model.no_sync():
                self.model(data).backward()
        after, left = self.gradients(), self.owed()
        by_any = dict(zip(self.params, gathered(used).any(0).tolist(), strict=True))
        self.partly += not all(used for name, used in by_any.items() if name != "empty")
        for name, param in self.params.items():
            if not by_any[name]:
                # Neither sent nor lost.
                assert (param.grad is None) == (name in none), name
                assert torch.equal(after[name], before[name]), f"{name} in step {step}"
                if name in left:
                    assert torch.equal(left[name], owed[name]), f"{name} in step {step}"
                    self.left_alone += int(bool(owed[name].any() and before[name].any()))
                continue
            # FSDP2 adds what it reduced, DDP reduces what has added up.
            mine = new[name] if self.replicated else before[name] + new[name]
            out = self.ranks * wide(after[name] - before[name] if self.replicated else after[name])
            came = gathered(wide(mine))
            sizes = wide(before[name]).abs() + wide(new[name]).abs()
            size = gathered(sizes).sum(0) + out.abs()
            off = out - came.sum(0)
            if name in owed:
                off = off + (left[name] - owed[name])
                size = size + owed[name].abs() + left[name].abs()
            lost = float((off.abs() - 2.0**-20 * size).max())
            assert lost <= 0, f"{lost:.3g} of {name} is lost in step {step}"


def zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(local(param).detach(), memory_format=torch.contiguous_format)


def wide(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


@on_ranks()
@pytest.mark.parametrize(("world_size", "how"), [(3, "find_unused_parameters"), (4, "replicate")])
def test_nothing_is_lost(rank: int, world_size: int, how: str) -> None:
    """Four ranks are on two hosts."""
    torch.manual_seed(rank)
    books, draw = Books(how, world_size, 2 if world_size == 4 else None), random.Random(0)
    for step in range(STEPS):
        books.step(rank, step, stale=step % 4 > 0, twice=step > 0 and draw.random() < 0.4)
    assert books.partly > STEPS - WARM  # in the warm-up, too
    assert books.left_alone > 0
    assert any(owed.any() for owed in books.owed().values())

"""`examples/simple.py` and the library compute the same: policy `hybrid`, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import tagc
from examples import simple
from support.block_net import wrap
from support.distributed import on_ranks
from support.exact import equal
from support.paths import EXAMPLES, ROOT
from support.small_net import local_weights

HYBRID = yaml.safe_load((ROOT / "policies" / "hybrid.yaml").read_text())
Step = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Shards and residuals after a step."""


def loss_of(model: Any, step: int) -> Tensor:
    """In odd steps other ranks than the first have such small gradients that sums are rounded, and
    the order of additions shows. (Sums of a few codes of like size are exact.)"""
    return simple.loss_of(model, step) * (2.0**-16 if step % 2 and dist.get_rank() else 1)


def by_page(steps: int) -> Iterator[Step]:
    torch.manual_seed(1)
    model: Any = simple.tiny_model()
    units = {
        "1": simple.Unit([*model[1].parameters()]),
        "": simple.Unit([*model[0].parameters(), *model[2].parameters()]),
    }
    names = {id(p): name for name, p in model.named_parameters()}
    shards = {
        names[id(p)]: shard
        for unit in units.values()
        for p, shard in zip(unit.params, unit.shards, strict=True)
    }
    optimizer = torch.optim.Adam(shards.values(), lr=0.01)
    for step in range(steps):
        simple.train_step([*units.values()], optimizer, lambda at=step: loss_of(model, at))
        residuals = {}
        for unit_name, unit in units.items():
            quantized = [segment.residual for segment in unit.segments if segment.quantized]
            residuals |= {f"{unit_name} {i}": r.clone() for i, r in enumerate(quantized)}
        yield {name: shard.detach().clone() for name, shard in shards.items()}, residuals


def by_library(policy: Any, steps: int) -> Iterator[Step]:
    torch.manual_seed(1)
    model: Any = simple.tiny_model()
    fully_shard(model[1])
    fully_shard(model)
    compressor = tagc.compressor(wrap(model, policy))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        residuals = {
            f"{reducer.plan.info.name} {i}": residual.clone()
            for reducer in compressor.reducers
            for i, residual in enumerate(reducer.residuals.values())
        }
        yield local_weights(model), residuals


@on_ranks(3)
def test_training(rank: int, world_size: int) -> None:
    (rule,) = HYBRID["gradients"]
    assert rule["feedback"]["reset_steps"] == simple.RESET_STEPS
    often = {**rule, "feedback": {**rule["feedback"], "reset_steps": 3}}
    with patch.object(simple, "RESET_STEPS", 3):
        for mine, theirs in zip(
            by_library({**HYBRID, "gradients": [often]}, 5), by_page(5), strict=True
        ):
            for found, expected in zip(mine, theirs, strict=True):
                equal(found, expected)
    assert all(residual.any() for residual in theirs[1].values())


def test_the_page_stays_one_page() -> None:
    text = (EXAMPLES / "simple.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert not re.search(r"\b(import|from) tagc\b", text)

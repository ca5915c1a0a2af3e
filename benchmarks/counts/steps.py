"""Launches of a step: a transformer's units go through their codecs, and launches are counted.

A step is the mean of some, after the first ones: what codecs measure they measure in all of the
first steps, and then in one of several. Units that differ in their names only are counted once.

Everything happens on the meta device, where there is nothing to compute with, and kernels are not
even compiled. What is counted is what the codecs launch: their kernels, and torch's. Left out are
the collectives, FSDP's own kernels, and what :mod:`tagc.collect` copies around codecs.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tagc.codecs import CodecSetup, Coder
from tagc.codecs.feedback.share import EVERY, FIRST
from tagc.codecs.workspace import Workspace
from tagc.collect.exchange import Exchange
from tagc.collect.transport import SilentGroup, SilentTransport
from tagc.costs.explain import plan_shapes
from tagc.costs.shapes import ModelShapes, synthetic
from tagc.plan import UnitPlan
from tagc.policy import Policy

from ..records import Record
from .torch_kernels import TorchKernels

RANKS = 8
_META = torch.device("meta")
_BF16 = torch.bfloat16


def count_step(policy: str, shapes: ModelShapes | None = None) -> Record:
    """Launches of a step.

    Args:
        shapes: default: a transformer of 7e9 parameters, which has 33 blocks.
    """
    shapes = synthetic(7_000_000_000) if shapes is None else shapes
    plan = plan_shapes(
        shapes, Policy.load(policy), world_size=RANKS, replicas=1, dtype=_BF16,
        parameter_dtype=_BF16, choose=None,
    )  # fmt: skip
    block = Counter[str]()
    total = Counter[str]()
    counted: dict[str, Counter[str]] = {}
    for unit in plan.all_units:
        alike = repr(unit).replace(unit.info.name, "")
        if alike not in counted:
            counted[alike] = _launches(unit)
        total.update(counted[alike])
        if unit.info.name == shapes.blocks[0]:
            block.update(counted[alike])
    return {
        "suite": "counts",
        "policy": policy,
        "blocks": len(shapes.blocks),
        "parameters": shapes.numel,
        "ranks": RANKS,
        "launches_per_block": _mean(sum(block.values())),
        "launches_per_step": _mean(sum(total.values())),
        "kernels_per_block": {name: _mean(n) for name, n in sorted(block.items())},
    }


def _mean(launches: int) -> float:
    """Of a step, from those of ``EVERY``."""
    each = launches / EVERY
    return int(each) if each.is_integer() else round(each, 1)


def _launches(unit: UnitPlan) -> Counter[str]:
    """Of ``EVERY`` steps, by kernel."""
    from triton.runtime.jit import JITFunction

    ops: Any = importlib.import_module("tagc.triton_kernels.ops")
    found = Counter[str]()

    def run(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:
        found[self.__name__.removesuffix("_kernel")] += 1

    def run_torchs(_: int) -> None:
        found["torch"] += 1

    if not unit.compressed:
        return found
    gathers = unit.direction == "parameters"
    setup = CodecSetup(
        destinations=1 if gathers else unit.info.world_size, world_size=unit.info.world_size,
        dtype=unit.info.dtype, ops=ops, device=_META, workspace=Workspace(_META),
    )  # fmt: skip
    coder = Coder(unit.segments, setup, apart=gathers)
    with mock.patch.object(JITFunction, "run", run), TorchKernels(run_torchs):
        try:
            (_gather if gathers else _reduce)(unit, coder, setup, found)
        finally:
            ops.release()
    return found


def _messages(n: int, unit: UnitPlan) -> Tensor:
    return torch.empty(n, unit.messages.row_words, dtype=torch.int32, device=_META)


def _reduce(unit: UnitPlan, coder: Coder, setup: CodecSetup, found: Counter[str]) -> None:
    ranks: Any = SilentGroup(RANKS)
    exchange = Exchange(SilentTransport(ranks), setup.workspace, for_all=False)
    grad = torch.empty(setup.destinations, unit.columns, dtype=setup.dtype, device=_META)
    out = torch.empty(unit.columns, dtype=setup.dtype, device=_META)
    for step in range(FIRST + EVERY):
        if step == FIRST:
            found.clear()
        coder.encode(grad, _messages(setup.destinations, unit), exchange)
        coder.start(exchange)
        coder.wait()
        coder.decode(_messages(setup.world_size, unit), out, exchange, setup.world_size)


def _gather(unit: UnitPlan, coder: Coder, setup: CodecSetup, found: Counter[str]) -> None:
    rows = torch.empty(setup.world_size, unit.columns, dtype=setup.dtype, device=_META)
    sent = rows[:1].float() if unit.keeps_copy else rows[:1]
    found.clear()
    coder.encode_rows(sent, _messages(1, unit))
    coder.decode_rows(_messages(setup.world_size, unit), rows)
    times = 1 if unit.keeps_copy else unit.exchanges
    for name in found:
        found[name] *= times * EVERY

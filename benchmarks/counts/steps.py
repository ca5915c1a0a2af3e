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
from torch.utils._python_dispatch import TorchDispatchMode

from tagc.codecs import CodecSetup, kind_of
from tagc.codecs.feedback.share import EVERY, FIRST
from tagc.codecs.registry import make_codecs
from tagc.codecs.workspace import Workspace
from tagc.costs.explain import plan_shapes
from tagc.costs.shapes import ModelShapes, synthetic
from tagc.plan import UnitPlan
from tagc.policy import Policy

from ..records import Record

RANKS = 8
_META = torch.device("meta")
_BF16 = torch.bfloat16


class _Kernels(TorchDispatchMode):
    """Counts torch's kernels: what neither makes a view nor allocates."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aliases = [r.alias_info for r in func._schema.returns]
        view = any(a is not None and not a.is_write for a in aliases)
        allocates = "empty" in func._schema.name
        if not view and not allocates and func._schema.name not in ("aten::detach", "aten::alias"):
            self._found["torch"] += 1
        return func(*args, **(kwargs or {}))


class _Done:
    wire_bytes = 0

    def wait(self) -> None:
        pass


class _Alone:
    """An exchange that sends nothing."""

    row, takes_leftovers, wire_bytes = 0, True, 0

    def add_inside(self, grad: Tensor) -> Tensor:
        return grad

    def send(self, received: Tensor, message: Tensor) -> _Done:
        return _Done()

    def sum_cells(self, cells: Tensor) -> tuple[_Done, Tensor]:
        return _Done(), cells[0]

    def sum_counts(self, counts: Tensor) -> _Done:
        return _Done()

    def gather(self, values: Tensor) -> Tensor:
        return values.new_empty(RANKS, *values.shape)


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

    if not unit.compressed:
        return found
    run_unit = _gather if unit.direction == "parameters" else _reduce
    setup = CodecSetup(
        destinations=1 if unit.direction == "parameters" else unit.info.world_size,
        world_size=unit.info.world_size, dtype=unit.info.dtype, ops=ops, device=_META,
        workspace=Workspace(_META),
    )  # fmt: skip
    with mock.patch.object(JITFunction, "run", run), _Kernels(found):
        try:
            run_unit(unit, setup, found)
        finally:
            ops.release()
    return found


def _reduce(unit: UnitPlan, setup: CodecSetup, found: Counter[str]) -> None:
    codecs = make_codecs(unit.segments, setup)
    columns = unit.segments[-1].stop
    grad = torch.empty(setup.destinations, columns, dtype=setup.dtype, device=_META)
    out = torch.empty(columns, dtype=setup.dtype, device=_META)
    exchange = _Alone()
    for step in range(FIRST + EVERY):
        if step == FIRST:
            found.clear()
        for codec in codecs.values():
            message = torch.empty(setup.destinations, codec.words, dtype=torch.int32, device=_META)
            received = torch.empty(setup.world_size, codec.words, dtype=torch.int32, device=_META)
            codec.encode(grad, message, exchange)
            codec.start(exchange)
            codec.wait()
            codec.decode(received, out, exchange, setup.world_size)


def _gather(unit: UnitPlan, setup: CodecSetup, found: Counter[str]) -> None:
    rows = torch.empty(setup.world_size, unit.segments[-1].stop, dtype=setup.dtype, device=_META)
    if unit.keeps_copy:
        rows = rows.float()
    made = [(segment, kind_of(segment.codec).codec([segment], setup)) for segment in unit.segments]
    found.clear()
    for _, codec in made:
        message = torch.empty(setup.world_size, codec.words, dtype=torch.int32, device=_META)
        codec.encode_rows(rows[:1], message[:1])
        codec.decode_rows(message, rows)
    times = 1 if unit.keeps_copy else unit.exchanges
    for name in found:
        found[name] *= times * EVERY

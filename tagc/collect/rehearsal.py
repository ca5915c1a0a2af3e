"""Runs a unit's programs without other ranks and without memory, to show which operators it calls.

Tensors are on device ``meta``: they have shapes, strides and alignment, but no contents. That is
enough to compile all kernels of a step before the first step.
"""

from __future__ import annotations

from typing import Any

import torch

from tagc.codecs.workspace import Workspace
from tagc.collect.lockstep import Lockstep
from tagc.collect.replay import Replay, Store
from tagc.collect.transport import SilentGroup, SilentTransport, Transport
from tagc.ops import Ops
from tagc.ops.program import Level, Program
from tagc.plan import Plan, UnitPlan
from tagc.plan.programs import programs_of

_META = torch.device("meta")


def rehearse(plan: Plan, ops: Ops, *, stamped: bool) -> None:
    """Call the operators of ``ops`` as the steps of a model will, on ``meta`` tensors.

    Args:
        stamped: whether messages carry stamps, see :mod:`tagc.collect.lockstep`.
        ops: operators that write nothing, such as those of
            :meth:`tagc.ops.implementations.DeviceOps.compiling_only`.
    """
    workspace = Workspace(_META)
    for unit in (*plan.units, *plan.replicas, *plan.parameters):
        if unit.compressed:
            store = Store(_META, workspace)
            for program in programs_of(unit, stamped=stamped):
                _run(unit, program, store, ops)


def _run(unit: UnitPlan, program: Program, store: Store, ops: Ops) -> None:
    info = unit.info
    sizes: dict[Level, int] = {
        "flat": info.world_size, "across": unit.peers, "inside": info.ranks_per_host
    }  # fmt: skip
    levels: dict[Level, Transport] = {level: _transport(n) for level, n in sizes.items()}
    lockstep = Lockstep(unit.direction, info.label, _META)
    replay = Replay(program, store, ops, levels, lockstep, 0)
    late = {
        place.name: torch.empty(place.shape, dtype=place.dtype, device=_META)
        for place in program.places
        if place.kind == "late"
    }
    if unit.direction != "parameters":
        replay.run(late)
        return
    # A rank's shard is its row of FSDP's output, so the rank decides whether it is aligned. One
    # rank of a host compiles for all of them.
    rows = torch.empty(info.world_size, unit.columns, dtype=info.dtype, device=_META)
    for rank in range(min(2, info.world_size)):
        replay.run(late | {"inp": rows[rank : rank + 1]})


def _transport(size: int) -> Transport:
    group: Any = SilentGroup(size)
    return SilentTransport(group)

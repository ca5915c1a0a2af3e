"""Makes the collectives that replace FSDP's from a plan, and installs them on a model's units.

Before the first step, a rehearsal of the plan's steps records the calls of operators. The operators
are compiled for these, once per host, and compared with the reference on small inputs.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tagc.attach import Levels, OptimizerSteps, Unit
from tagc.attach.changes import KnownParameters
from tagc.basics.files import locked
from tagc.basics.progress import Progress
from tagc.codecs.workspace import Workspace
from tagc.collect import (
    CopyGatherer,
    GatherSetup,
    HostGroups,
    MessageGatherer,
    ReplicaAverage,
    Transport,
    UnitGatherer,
    UnitReducer,
    rehearse,
)
from tagc.collect.waiting import Waiting
from tagc.ops import Ops, compiles_ahead, get_ops
from tagc.plan import Plan, UnitInfo, UnitPlan, build_plan
from tagc.policy import Policy
from tagc.selfcheck import Recorder, check


@dataclass
class Collectives:
    """The replacements of FSDP's collectives, in the order of the units. ``gatherers`` and
    ``replica_reducers`` are empty if the policy has no rules for them."""

    units: Sequence[Unit]
    reducers: list[UnitReducer] = field(default_factory=list)
    gatherers: list[UnitGatherer] = field(default_factory=list)
    replica_reducers: list[UnitReducer] = field(default_factory=list)
    levels: Levels | None = None  # the process groups that tagc made for hosts
    steps: OptimizerSteps | None = None  # tells the gatherers about the optimizer's steps
    replica_group: dist.ProcessGroup | None = None  # that holds the same shard in other replicas
    # Average over ``replica_group`` if compression is switched off.
    stand_ins: list[UnitReducer] = field(default_factory=list)
    known: KnownParameters | None = None  # the model's parameters when it was wrapped
    unwatch: Callable[[], None] | None = None  # ends what tells groups of the model's forward

    @property
    def waiting(self) -> list[Waiting]:
        return [reducer.waiting for reducer in (*self.all_reducers, *self.stand_ins)]

    def watch(self, model: nn.Module) -> None:
        """From now on, refuse gradients of parameters that the plan does not know."""
        if not any(reducer.plan.compressed for reducer in self.all_reducers):
            return
        self.known = KnownParameters(model)
        check = self.known.checker()
        for reducer in self.reducers:
            reducer.before = check

    @property
    def all_reducers(self) -> list[UnitReducer]:
        return [*self.reducers, *self.replica_reducers]

    def clear(self) -> None:
        """Drop everything, including process groups and the operators' scratch buffers."""
        if self.levels is not None:
            self.levels.release()
        if self.steps is not None:
            self.steps.close()
        if self.unwatch is not None:
            self.unwatch()
        for part in (*self.all_reducers, *self.gatherers):
            part.release()
        self.reducers.clear()
        self.gatherers.clear()
        self.replica_reducers.clear()


def on_gloo(units: Sequence[Unit]) -> bool:
    """Whether the backend is gloo, where tagc sums by messages."""
    return any(Transport(unit.group).adds_itself(unit.device) for unit in units)


def over_replicas(units: Sequence[Unit], group: dist.ProcessGroup) -> list[UnitInfo]:
    return [replace(unit.info, world_size=group.size(), per_step=1) for unit in units]


def make_collectives(
    units: Sequence[Unit],
    plan: Plan,
    levels: Levels,
    ops: str | None,
    replica_group: dist.ProcessGroup | None,
) -> Collectives:
    """Make the collectives of a plan; :func:`install` installs them."""
    gathers = any(unit_plan.compressed for unit_plan in plan.parameters)
    if gathers or plan.replicas:
        for unit in units:
            unit.check_own(gather=gathers, average=bool(plan.replicas))
    made = Collectives(units, levels=levels, replica_group=replica_group)
    shared = {unit.device: Workspace(unit.device) for unit in units}

    def parts(unit: Unit, unit_plan: UnitPlan) -> tuple[Ops, HostGroups | None]:
        # A unit that stays dense needs no operators, and no warning about them.
        chosen = get_ops(unit.device, ops if unit_plan.compressed else "reference")
        return chosen, levels.groups(unit) if unit_plan.info.ranks_per_host > 1 else None

    def make_reducers() -> None:
        for plans, found in (
            (plan.units, made.reducers),
            (plan.replicas, made.replica_reducers),
        ):
            for i, (unit, unit_plan) in enumerate(zip(units, plans, strict=bool(plans))):
                unit_ops, hosts = parts(unit, unit_plan)
                reducer = UnitReducer(
                    unit_plan,
                    unit_ops,
                    unit.device,
                    shared[unit.device],
                    # Units differ in their seeds, so that equal layouts do not share bad luck.
                    seed=(i * 0x9E3779B1) % 2**31,
                    rank=_place(unit, replica_group),
                    hosts=hosts,
                    crosses=lambda unit=unit: unit.all_reduces,
                )
                found.append(reducer)

    def make_gatherers() -> None:
        if not gathers:
            return
        alike: defaultdict[Hashable, list[CopyGatherer]] = defaultdict(list)
        # On every unit, so that the bytes of units that stay dense are counted too.
        for i, (unit, unit_plan) in enumerate(zip(units, plan.parameters, strict=True)):
            if unit_plan.compressed and unit_plan.info.dtype == torch.uint8:
                raise ValueError(
                    f"unit {unit.info.label!r} has parameters of several dtypes, which FSDP "
                    "gathers as bytes; leave them out of the policy's rules for parameters, or "
                    "give the unit a MixedPrecisionPolicy(param_dtype=...)"
                )
            unit_ops, hosts = parts(unit, unit_plan)
            setup = GatherSetup(
                plan=unit_plan,
                ops=unit_ops,
                device=unit.device,
                workspace=shared[unit.device],
                rank=unit.group.rank(),
                hosts=hosts,
            )
            if not unit_plan.keeps_copy:
                made.gatherers.append(MessageGatherer(setup))
                continue
            gatherer = CopyGatherer(
                setup,
                reductions=lambda i=i: made.reducers[i].counters.steps,
                versions=lambda unit=unit: sum(p._version for p in unit.trainable()),
                shard=unit.shard,
                alike=alike[unit.group, unit.device],
            )
            made.gatherers.append(gatherer)

    # Both compile kernels, each on one rank of a host: half of the ranks begin at the other end.
    order = (make_reducers, make_gatherers)
    for make in order if dist.get_rank() % 2 == 0 else reversed(order):
        make()
    return made


def _place(unit: Unit, replica_group: dist.ProcessGroup | None) -> int:
    """The rank number that seeds stochastic rounding. If the unit has duplicates, tensor-parallel
    ranks get the same number, because duplicates must stay the same on all of them."""
    if all(param.duplicate is None for param in unit.info.params):
        return dist.get_rank()
    replica = 0 if replica_group is None else replica_group.rank()
    return replica * unit.group.size() + unit.group.rank()


def install(c: Collectives) -> None:
    """Let the units call their collectives. Each list is as long as that of units, or empty."""
    for unit, reducer in zip(c.units, c.reducers, strict=bool(c.reducers)):
        # One rank has its average already: FSDP reduces nothing then, but DDP would call us.
        if unit.info.world_size > 1 or not unit.info.replicated:
            unit.install(reducer)
    pairs = list(zip(c.units, c.gatherers, strict=bool(c.gatherers)))
    for unit, gatherer in pairs:
        unit.install_gather(gatherer)
    copying = [(unit, g) for unit, g in pairs if isinstance(g, CopyGatherer)]
    if copying:
        c.steps = OptimizerSteps(copying)
    _install_averages(c, c.replica_reducers)


def average_natively(c: Collectives) -> None:
    """Average with the backend's all-reduce over replicas that FSDP does not know."""
    assert c.replica_group is not None
    infos, replicas = [unit.info for unit in c.units], over_replicas(c.units, c.replica_group)
    plan = build_plan(infos, Policy.load("dense"), replicas=replicas)
    c.stand_ins = [
        UnitReducer(p, get_ops(u.device, "reference"), u.device, Workspace(u.device), seed=0)
        for u, p in zip(c.units, plan.replicas, strict=True)
    ]
    _install_averages(c, c.stand_ins)


def _install_averages(c: Collectives, reducers: Sequence[UnitReducer]) -> None:
    for unit, reducer in zip(c.units, reducers, strict=bool(reducers)):
        assert c.replica_group is not None
        # FSDP's own hybrid sharding does not call this in a backward that replicas do not share.
        native = unit.replicas is not None
        average = ReplicaAverage(
            reducer,
            c.replica_group,
            lambda unit=unit, native=native: native or unit.all_reduces,
            lambda unit=unit: unit.reached,
        )
        unit.install_all_reduce(average)


def make_ready(plan: Plan, ops: Ops, device: torch.device, *, shown: bool) -> str | None:
    """Compile and check the operators of ``ops`` that the plan's units will call on ``device``.
    Returns a note for users on what was checked; None if the implementation is not compiled
    ahead."""
    if not compiles_ahead(ops):
        return None
    progress = Progress("operators compiled, cached for later runs", shown=shown)
    recorder = Recorder(ops, progress.step)
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with _with_a_compiler(), current:
        # The ranks of a host take turns: those after the first find compiled kernels.
        # A user is named by number: in containers one may have no name.
        user = os.getuid() if hasattr(os, "getuid") else "user"
        folder = Path(tempfile.gettempdir()) / f"tagc-{user}"
        with locked(folder, "kernels"), ops.compiling_only():
            rehearse(plan, recorder.ops, stamped=device.type != "cpu")
        progress.end()
        progress = Progress("operators checked", len(recorder.calls), shown=shown)
        note = check(ops, device, recorder.calls, progress.step)
        progress.end()
    return f"kernels: {note}"


@contextmanager
def _with_a_compiler() -> Iterator[None]:
    """Explain a missing C compiler: Triton builds the launcher of each kernel with it."""
    try:
        yield
    except (RuntimeError, subprocess.CalledProcessError) as error:
        if isinstance(error, RuntimeError) and "C compiler" not in str(error):
            raise
        raise RuntimeError(
            "tagc: Triton could not build its kernel launcher on this host. It needs a C "
            "compiler and Python's headers: install gcc and python3-dev (or what your system calls "
            "them) on every host, or name a compiler by the environment variable CC. "
            f"TAGC_OPS=reference needs neither, but is slow. Triton's error: {error}"
        ) from error


def with_kernels(units: Sequence[Unit], plan: Plan, ops: str | None) -> Plan:
    """Compile and check the plan's kernels; the plan gets notes on them."""
    if not any(unit_plan.compressed for unit_plan in plan.all_units):
        return plan
    notes = [
        make_ready(plan, get_ops(device, ops), device, shown=dist.get_rank() == 0)
        for device in dict.fromkeys(unit.device for unit in units)
    ]
    return replace(plan, notes=(*plan.notes, *(note for note in notes if note is not None)))

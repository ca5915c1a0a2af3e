"""One unit of a model that is trained in several sites: this rank's shard, its last common value,
and how its changes are averaged.

A site trains on its own. When the unit is due, its change since the *anchor*, the value that all
sites last agreed on, is averaged over sites. The outer optimizer moves the anchor by the average,
and the site goes on from there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tagc.attach.fsdp2 import FSDP2Unit
from tagc.attach.unit import Unit
from tagc.codecs.workspace import Workspace
from tagc.collect.reducer_state import ReducerState
from tagc.collect.replay import Replay
from tagc.collect.transport import SilentGroup, Transport
from tagc.ops import Ops, get_ops
from tagc.ops.program import Level, Program
from tagc.plan import AT_ONCE, UnitPlan, as_list, span_of
from tagc.plan.reductions import Variant
from tagc.plan.two_shots import slicing_of
from tagc.policy.roles import clean_name
from tagc.policy.rules import OuterConfig, SitesConfig


@dataclass(frozen=True, kw_only=True)
class SiteUnit(Unit):
    """One unit of a model that is exchanged between sites: ``info`` is the all-reduce of this
    rank's shard ``[S]``, in float32, over the ranks ``group`` with this shard in all sites.

    Ranks of a site that hold the same parameters share the work: each exchanges one row of them,
    and then they gather the rows.

    Attributes:
        inner: the ranks of the site that hold shards of it; None on one device.
        whole: whether these ranks hold the whole unit, not only their shard.
    """

    inner: dist.ProcessGroup | None
    whole: bool
    _params: Sequence[nn.Parameter] | Unit

    @cached_property
    def shards(self) -> int:
        """Number of shards of the unit."""
        return 1 if self.inner is None else self.inner.size()

    @cached_property
    def shard(self) -> int:
        """Index of this rank's shard."""
        return 0 if self.inner is None else self.inner.rank()

    def trainable(self) -> list[nn.Parameter]:
        # Looked up every time: after a load with `assign`, FSDP has other parameters.
        return self._params.trainable() if isinstance(self._params, Unit) else list(self._params)

    def held(self) -> list[nn.Parameter]:
        """:meth:`trainable`, and what the model has in their place while FSDP gathers them."""
        params = self.trainable()
        return params + self._params.gathered() if isinstance(self._params, FSDP2Unit) else params

    @torch.no_grad()
    def read(self, out: Tensor | None = None) -> Tensor:
        """Copy this rank's shard to ``out`` ``[S]``, by default a new tensor in float32, with zeros
        as padding."""
        if out is None:
            out = torch.empty(sum(self._columns), dtype=torch.float32, device=self.device)
        out.zero_()
        for local, place in zip(self._rows(self.shard), out.split(self._columns), strict=True):
            place[: local.numel()].copy_(local.reshape(-1))
        return out

    @property
    @torch.no_grad()
    def writes(self) -> int:
        """How often torch saw anything write to the parameters (not through ``.data``)."""
        return sum(local._version for local in self._rows(self.shard))

    @torch.no_grad()
    def not_finite(self) -> Tensor:
        """The number, from 1, of a parameter of ``info`` that has a NaN or an infinity in this
        rank's shard; 0 if none has. int64 ``[]``; the host does not wait for it."""
        rows = [(i, row) for i, row in enumerate(self._rows(self.shard), 1) if row.numel()]
        if not rows:
            return torch.zeros((), dtype=torch.int64, device=self.device)
        # In float32, as it is exchanged.
        largest = torch._foreach_norm([row for _, row in rows], math.inf, dtype=torch.float32)
        numbers = torch.tensor([i for i, _ in rows], dtype=torch.int64, device=self.device)
        return numbers.masked_fill_(torch.stack(largest).isfinite(), 0).max()

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Replace this rank's shard by ``values`` ``[S]``. If ranks of the site hold the whole
        unit, they gather all shards: they call it together."""
        shards = {self.shard: values}
        if self.whole and self.inner is not None:
            rows = values.new_empty(self.shards, values.numel())
            Transport(self.inner).all_gather(rows.view(-1), values).wait()
            shards = dict(enumerate(rows))
        for shard, of_shard in shards.items():
            for local, place in zip(self._rows(shard), of_shard.split(self._columns), strict=True):
                local.copy_(place[: local.numel()].view(local.shape))

    @cached_property
    def _columns(self) -> list[int]:
        return [param.columns for param in self.info.params]

    def _rows(self, shard: int) -> list[Tensor]:
        """A shard of every parameter, without padding, in the parameters' own memory."""
        rows: list[Tensor] = []
        for param in self.trainable():
            row = param.detach()
            if self.whole:
                row = row.view(1) if row.ndim == 0 else row
                row = row.narrow(0, *span_of(len(row), shard, self.shards))
            rows.append(row.to_local() if isinstance(row, DTensor) else row)
        return rows


def check_trainable(model: nn.Module, units: Sequence[SiteUnit]) -> None:
    """Raise ValueError for trainable parameters that are not exchanged."""
    held = {id(param) for unit in units for param in unit.held()}
    new = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if new:
        raise ValueError(
            f"sites do not exchange {as_list([clean_name(name) for name in new])}: neither "
            "fully_shard nor DistributedDataParallel holds them, or they became trainable, or were "
            "added or replaced, after tagc.sites. Give these the whole model. In all sites, call "
            "exchange() and remove() of the handle before such a change, and tagc.sites after it, "
            "with an optimizer that holds them"
        )


@dataclass
class Owed:
    """What a site owes the others of one unit: copies of the residuals of a plan, by the segment's
    first column in the unit, after so many exchanges."""

    plan: UnitPlan
    residuals: dict[int, Tensor]
    exchanges: int

    def put(self, reducer: ChangeReducer) -> None:
        """Copy the residuals to those of a reducer. If it is for another number of sites, they are
        in other slices there."""
        if reducer.plan.peers != self.plan.peers:
            _move(reducer.plan, reducer.residuals, self.in_shard(), back=False)
            return
        for start, residual in reducer.residuals.items():
            residual.copy_(self.residuals[start])

    def in_shard(self) -> Tensor:
        """The residuals in the columns of the shard, ``[1, S]``; zeros where there are none."""
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        some = next(iter(self.residuals.values()), none)
        shard = some.new_zeros(1, self.plan.buffer_columns, dtype=torch.float32)
        _move(self.plan, self.residuals, shard, back=True)
        return shard


def _move(plan: UnitPlan, residuals: dict[int, Tensor], shard: Tensor, *, back: bool) -> None:
    """Copy a plan's residuals from the columns of the shard ``[1, S]``, or back to them."""
    rows, parts = shard, plan.segments
    if plan.shots is not None:
        rows = shard.new_zeros(plan.peers, plan.shots.reduce.columns)
        parts = plan.shots.reduce.segments
        if not back:
            slicing_of(plan).run(shard, rows)
    for whole, part in zip(plan.segments, parts, strict=True):
        if whole.start in residuals:
            there, here = residuals[whole.start], rows[:, part.start : part.stop]
            here.copy_(there) if back else there.copy_(here)
    if back and plan.shots is not None:
        replace(slicing_of(plan), back=True, empty=()).run(rows, shard)


class ChangeReducer(ReducerState):
    """Averages a unit's changes over the sites that are there, by the programs of its plan. They
    are bound once for these sites.

    Sites compare which exchange they are at before they send a change, so messages have neither
    headers nor stamps.
    """

    def __init__(self, plan: UnitPlan, ops: Ops, device: torch.device, *, seed: int, rank: int):
        """Start with empty state; :meth:`connect` comes next."""
        self._levels: dict[Level, Transport] = {}
        self._replays: dict[Variant, Replay] = {}
        # Units are averaged in turns, so each one has buffers of its own.
        super().__init__(plan, ops, device, Workspace(device), seed=seed, rank=rank)

    def connect(self, transport: Transport) -> None:
        """Average over this rank's counterparts in these sites; call it once."""
        self._levels["flat"] = transport

    def averaging(self, change: Tensor) -> Iterator[None]:
        """Replace a change ``[S]`` by its average; pauses while messages are in flight."""
        warm = self.counters.all_steps >= self.plan.warmup_steps
        messages = bool(self.plan.compressed) and warm
        variant = self.variant(messages=messages, mean=True, part=None, always=False)
        if variant not in self._replays:
            self._replays[variant] = self._bind(self.programs.lower(variant))
        replay = self._replays[variant]
        if messages:
            self.restart_feedback()
        yield from replay.running({"inp": change, "out": change})
        self.store.workspace.clear()
        self.counters.steps += 1
        self.counters.compressed_steps += messages
        self.counters.add(replay.sent)
        self.advance(variant)

    def fold(self, site: int, sites: int) -> None:
        """Add what this site owes as the owner of slices to its own residuals. An owner owes parts
        of averages, so they count once for every site."""
        residuals = self.residuals
        for i, residual in self.owner_residuals.items():
            residuals[i][site].add_(residual[0], alpha=sites)
            residual.zero_()

    def _bind(self, program: Program) -> Replay:
        own = self._levels["flat"].rank if self._levels else 0
        return Replay(
            program, self.store, self._ops, self._levels, self._lockstep, own, compares=False
        )


class Anchor:
    """The anchor of one unit, ``[S]`` float32, and the outer optimizer's state.

    Attributes:
        label: the unit's name, for users.
        reducer: averages changes over the sites that are there.
        values: the anchor. It has the same bits in all sites.
        change: this site's change until it is exchanged, then the average of all sites until it
            is applied. Without delay there is none between exchanges; with delay it is then zero.
    """

    def __init__(
        self,
        unit: SiteUnit,
        plan: UnitPlan,
        config: SitesConfig,
        ops: str | None,
        number: int,
    ) -> None:
        """Start from the parameters as they are; ``number`` is the index of the unit."""
        self.unit, self.label, self._config, self._ops = unit, unit.info.label, config, ops
        # Units differ in their seeds, so that equal layouts do not share bad luck.
        self._seed = (number * 0x9E3779B1) % 2**31
        self.reducer = self._reducer(plan, unit.group.rank())
        self.values = unit.read()
        self.momentum = torch.zeros_like(self.values) if config.outer.momentum else None
        self.change: Tensor | None = None
        self.drop_change()

    def _reducer(self, plan: UnitPlan, site: int) -> ChangeReducer:
        info, device, rank = self.unit.info, self.unit.device, dist.get_rank()
        if any(param.duplicate is not None for param in info.params):
            rank = site  # tensor-parallel ranks must round duplicates alike
        elif isinstance(self.unit.group, SilentGroup):  # torch counts the ranks of this site only
            rank += site * dist.get_world_size()
        # A unit that stays dense needs no operators, and no warning about them.
        ops = get_ops(device, self._ops if plan.compressed else "reference")
        return ChangeReducer(plan, ops, device, seed=self._seed, rank=rank)

    def start_over(self, plan: UnitPlan, transport: Transport, owed: Owed) -> None:
        """Average over these sites from now on, and owe this. All other state of the codecs starts
        over, as in all sites then, in new tensors: what failed may still write to the old ones."""
        counters = self.reducer.counters
        self.reducer = self._reducer(plan, transport.rank)
        self.reducer.connect(transport)
        self.reducer.reset(owed.exchanges)
        self.reducer.counters = replace(
            counters, steps=0, compressed_steps=0, earlier_steps=owed.exchanges
        )
        owed.put(self.reducer)

    @property
    def exchanges(self) -> int:
        """How often it was exchanged."""
        return self.reducer.counters.all_steps

    def owed(self) -> Owed:
        """What this site owes."""
        copies = {start: residual.clone() for start, residual in self.reducer.residuals.items()}
        return Owed(self.reducer.plan, copies, self.exchanges)

    def take_change(self, *, none: bool = False) -> None:
        """Note how far this site has come: the anchor minus its shard; with ``none``, nothing."""
        change = torch.empty_like(self.values) if self.change is None else self.change
        if none:
            self.change = change.zero_()
        else:
            self.change = torch.sub(self.values, self.unit.read(change), out=change)

    def drop_change(self) -> None:
        """Drop a change that was not exchanged. What failed may still write to its tensor."""
        self.change = torch.zeros_like(self.values) if self._config.delay else None

    @torch.no_grad()
    def averaging(self, sites: int, trained: int) -> Iterator[None]:
        """Replace the change by its average over the sites that have trained; a generator, which
        pauses while messages are in flight. All sites call it together. A single site keeps its
        change, and its residuals."""
        assert self.change is not None
        if sites == 1:
            self.reducer.counters.steps += 1
            return
        yield from self.reducer.averaging(self.change)
        if trained < sites:
            self.change.mul_(sites / trained)

    @torch.no_grad()
    def apply(self, outer: OuterConfig, alpha: float) -> None:
        """Move the anchor by the average, as ``torch.optim.SGD(nesterov=True)`` would with the
        average as the gradient, and the site's shard to it, but for the share ``alpha``."""
        average = self.change
        assert average is not None
        if outer.momentum and self.momentum is not None:
            self.momentum.mul_(outer.momentum).add_(average)
            average.add_(self.momentum, alpha=outer.momentum)
        self.values.add_(average, alpha=-outer.rate)
        if alpha:
            self.unit.write(self.unit.read(average).lerp_(self.values, 1 - alpha))
        else:
            self.unit.write(self.values)
        self.change = average.zero_() if self._config.delay else None

    def restart(self) -> None:
        """Start again from the parameters as they are; what was owed is dropped."""
        self.unit.read(self.values)
        for kept in (self.momentum, self.change):
            if kept is not None:
                kept.zero_()
        self.reducer.drop_owed()

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors ``[S]`` that all sites hold alike, by kind as named in checkpoints."""
        found = {"anchor": self.values, "momentum": self.momentum, "in_flight": self.change}
        return {kind: values for kind, values in found.items() if values is not None}


def in_turns(exchanges: Iterable[tuple[int, Iterator[None]]]) -> None:
    """Exchange all of these units: one is computed while messages of the others are in flight. An
    exchange is a generator, which pauses while its messages are in flight.

    The order depends on the sizes only, so ranks that exchange the same units meet in the same
    collectives.

    Args:
        exchanges: the elements of each unit, and its exchange.
    """
    later, begun = deque(exchanges), deque[tuple[int, Iterator[None]]]()
    elements = 0
    while later or begun:
        if later and (not begun or elements + later[0][0] <= AT_ONCE):
            one = later.popleft()
            elements += one[0]
        else:
            one = begun.popleft()
        if next(one[1], _DONE) is _DONE:
            elements -= one[0]
        else:
            begun.append(one)


_DONE = object()

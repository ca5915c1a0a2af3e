"""The parts of a model that sites exchange: this rank's shard of every parameter, by unit.

A site holds the whole model: sharded by FSDP2, whole on every rank (DDP), or on one device. Ranks
of a site that hold the same parameters share the work: each exchanges one row of them, and then
they gather the rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tagc.attach import ddp
from tagc.attach.ddp import DDP
from tagc.attach.fsdp2 import FSDP2, FSDP2Unit
from tagc.attach.integrations import INTEGRATIONS, integration_of
from tagc.attach.unit import Unit
from tagc.attach.whole import Named, columns_in_rows, info_of_set, parameter_sets
from tagc.collect import SilentGroup, Transport, gather_by_rank, timeout_of
from tagc.plan import as_list, between_sites
from tagc.policy.roles import clean_name


@dataclass(frozen=True, kw_only=True)
class SiteUnit(Unit):
    """One unit of a model that is exchanged between sites: ``info`` is the all-reduce of this
    rank's shard ``[S]``, in float32, over the ranks ``group`` with this shard in all sites.

    Attributes:
        inner: the ranks of the site that hold shards of it; None on one device.
        whole: whether these ranks hold the whole unit, not only their shard.
    """

    inner: dist.ProcessGroup | None
    whole: bool
    _params: Sequence[nn.Parameter] | Unit

    @property
    def shards(self) -> int:
        """Number of shards of the unit."""
        return 1 if self.inner is None else self.inner.size()

    @property
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
            columns = sum(param.columns for param in self.info.params)
            out = torch.empty(columns, dtype=torch.float32, device=self.device)
        out.zero_()
        for local, place in zip(self._rows(self.shard), self._split(out), strict=True):
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
            for local, place in zip(self._rows(shard), self._split(of_shard), strict=True):
                local.copy_(place[: local.numel()].view(local.shape))

    def _split(self, values: Tensor) -> Sequence[Tensor]:
        return values.split([param.columns for param in self.info.params])

    def _rows(self, shard: int) -> list[Tensor]:
        """A shard of every parameter, without padding, in the parameters' own memory."""
        params = [param.detach() for param in self.trainable()]
        if not self.whole:
            return [p.to_local() if isinstance(p, DTensor) else p for p in params]
        rows = [param.view(1) if param.ndim == 0 else param for param in params]
        sizes = [-(-len(param) // self.shards) for param in rows]
        return [r[shard * size : (shard + 1) * size] for r, size in zip(rows, sizes, strict=True)]


def site_units(
    model: nn.Module,
    counterparts: dist.ProcessGroup | None,
    fragments: int,
    wrapped: Sequence[Unit] | None,
) -> tuple[list[SiteUnit], str]:
    """The units of a model to exchange, and how it is held inside a site, as text.

    Args:
        counterparts: this rank's counterparts in all sites; None if sites come and go: the units
            are those of two sites then, with a group that sends nothing.
        fragments: how many parts the units are to be divided into.
        wrapped: the units of a model that ``tagc.wrap`` has wrapped; None if it is not.
    """
    group: Any = counterparts or SilentGroup(2)
    integration = integration_of(model) if any(i.shards(model) for i in INTEGRATIONS) else None
    if integration is FSDP2:
        inner = FSDP2.find_units(model) if wrapped is None else wrapped
        units = [_of_shards(unit, group) for unit in inner if unit.info.params]
    elif integration is None:
        units = _of_whole(_plain_params(model), None, group, fragments)
    elif integration is DDP:
        units = _of_whole(*ddp.whole_params(model), group, fragments)
    else:
        raise ValueError(
            f"the model is held by {integration.name}, which sites do not support; use "
            "DistributedDataParallel or fully_shard inside a site"
        )
    if not units:
        raise ValueError("the model has no trainable parameters")
    check_trainable(model, units)
    if counterparts is not None:
        for unit in units:
            _check_apart(unit)
    return units, _description(units, "one device" if integration is None else integration.name)


def check_trainable(model: nn.Module, units: Sequence[SiteUnit]) -> None:
    """Raise ValueError for trainable parameters that are not exchanged."""
    held = {id(param) for unit in units for param in unit.held()}
    new = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if new:
        raise ValueError(
            f"sites do not exchange {as_list([clean_name(name) for name in new])}: fully_shard "
            "does not hold them, or they became trainable, or were added or replaced, after "
            "tagc.sites. Give fully_shard the whole model; after such a change call remove() of "
            "the handle, then tagc.sites again, with an optimizer that holds them, in all sites"
        )


def _of_shards(unit: Unit, group: dist.ProcessGroup) -> SiteUnit:
    if unit.replicas is not None:
        raise ValueError(
            f"unit {unit.info.label!r} is sharded and replicated inside a site (HSDP); give "
            "fully_shard a mesh of one dimension inside a site"
        )
    return SiteUnit(
        info=between_sites(unit.info, group.size()),
        group=group,
        device=unit.device,
        parallel=unit.parallel,
        inner=unit.group,
        whole=False,
        _params=unit,
    )


def _of_whole(
    named: Sequence[Named],
    inner: dist.ProcessGroup | None,
    group: dist.ProcessGroup,
    fragments: int,
) -> list[SiteUnit]:
    rows = 1 if inner is None else inner.size()
    total = sum(param.numel() * param.element_size() for _, param in named if param.requires_grad)
    units = []
    for of_unit in parameter_sets(named, min(ddp.UNIT_BYTES, -(-total // fragments))):
        params = [param for _, param in of_unit]
        info = info_of_set(of_unit, group.size())
        pairs = zip(info.params, params, strict=True)
        cut = [replace(one, columns=columns_in_rows(param.shape, rows)) for one, param in pairs]
        units.append(
            SiteUnit(
                info=between_sites(replace(info, params=tuple(cut)), group.size()),
                group=group,
                device=params[0].device,
                inner=inner,
                whole=True,
                _params=params,
            )
        )
    return units


def _plain_params(model: nn.Module) -> list[Named]:
    named = [(clean_name(name), param) for name, param in model.named_parameters()]
    for name, param in named:
        if isinstance(param, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor of a model that is not sharded by fully_shard; "
                "apply fully_shard inside a site"
            )
    return named


def _check_apart(unit: SiteUnit) -> None:
    """Refuse sites that share a model inside: their parameters would be mixed up."""
    inside = () if unit.inner is None else dist.get_process_group_ranks(unit.inner)
    if len({*inside} & {*dist.get_process_group_ranks(unit.group)}) > 1:
        raise ValueError(
            f"unit {unit.info.label!r} is sharded or data parallel over ranks that sites=... says "
            "are in different sites: use the dimension of the mesh inside a site only"
        )


def _description(units: Sequence[SiteUnit], integration: str) -> str:
    numel = sum(param.columns for unit in units for param in unit.info.params)
    params = [(p.name, p.shape, p.columns, p.local) for unit in units for p in unit.info.params]
    shards = f" in {units[0].shards} shards" if units[0].shards > 1 else ""
    digest = f"{zlib.crc32(repr(params).encode()):08x}"
    return f"{integration}{shards}: {len(units)} units, {numel} elements a rank ({digest})"


class OwnGroup:
    """A new group of the ranks of another one, for exchanges that run while training uses that."""

    def __init__(
        self, group: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> None:
        """Make it; all ranks that ``groups`` connect call it together."""
        mine = tuple(dist.get_process_group_ranks(group))
        everyones = gather_by_rank(groups, {dist.get_rank(): mine})
        self._world = dist.group.WORLD
        # Either all processes make all of these groups, in the same order, or only the members.
        self._everywhere = len(everyones) == dist.get_world_size()
        found = sorted(set(everyones.values())) if self._everywhere else [mine]
        made = {
            ranks: dist.new_group(
                list(ranks),
                timeout=timeout_of(group, device),
                backend=str(dist.get_backend_config(group)),
                use_local_synchronization=not self._everywhere,
                group_desc="tagc between sites",
            )
            for ranks in found
        }
        own = made[mine]
        assert isinstance(own, dist.ProcessGroup)
        self.group = own
        # A rank that destroys it must not close connections that another one still makes.
        Transport(own).all_reduce(torch.zeros(1, dtype=torch.float32, device=device)).wait()

    def release(self) -> None:
        """Destroy it, unless the user has destroyed all groups. Groups of some of the processes
        stay, because torch would use their names again."""
        if self._everywhere and self._world is dist.group.WORLD:
            dist.destroy_process_group(self.group)

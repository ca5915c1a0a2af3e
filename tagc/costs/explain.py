"""Predicts what a policy does to a model, without training it and without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from tagc.attach.whole import check_policy
from tagc.basics.warn import warn
from tagc.costs.auto import FastestChoice
from tagc.costs.link import Link
from tagc.costs.shapes import ModelError, ModelShapes
from tagc.costs.speed import no_time
from tagc.plan import Choose, Plan, UnitInfo, as_list, between_sites, build_plan, merged
from tagc.policy import Policy, PolicyError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, and the ranks that train it."""

    shapes: ModelShapes
    world_size: int  # all ranks
    replicas: int = 1  # copies of the sharded model
    sites: int = 1
    ranks_per_host: int = 1
    ddp: bool = False  # each rank has the whole model
    dtype: torch.dtype = torch.float32  # of the gradients, before compression
    parameter_dtype: torch.dtype = torch.bfloat16  # that FSDP gathers
    gloo: bool = False  # on CPUs
    micro_batches: int = 1  # backwards in a step
    learning_rate: float | None = None  # for codec exact

    @property
    def levels(self) -> int:
        """How many ranks of a host add up their gradients before one of them sends; 1 if a replica
        does not span several whole hosts."""
        ranks, on_host = self.world_size // self.replicas, self.ranks_per_host
        return on_host if ranks % on_host == 0 and ranks > on_host else 1

    def plan(
        self, policy: Policy, *, link: Link | None = None, choose: Choose | None = None
    ) -> Plan:
        """Plan a policy. A link or ``choose`` resolves ``codec: auto``. Raises PolicyError or
        ModelError if the ranks do not fit the policy."""
        if self.sites > 1 or policy.sites is not None:
            return self._between_sites(policy)
        sharded = self.world_size // self.replicas
        gathers: list[UnitInfo] = []
        if self.ddp:
            check_policy(policy, self.replicas > 1)
            units = self.shapes.replicated_units(sharded, self.dtype, ranks_per_host=self.levels)
        elif policy.replicas and self.replicas == 1:
            raise PolicyError(
                f"policy {policy.name!r} has rules for replicas: give the number of replicas, or "
                "use a policy without such rules"
            )
        else:
            units, gathers = self.shapes.units(
                sharded, self.dtype, self.parameter_dtype, ranks_per_host=self.levels
            )
        across = [replace(unit, world_size=self.replicas, ranks_per_host=1) for unit in units]
        if link is not None:
            note = "chosen for the given link; codec time is not included"
            choose = FastestChoice(lambda *_: link, no_time, (note,), self.micro_batches)
        plan = build_plan(
            units,
            policy,
            gathers=gathers,
            replicas=across if self.replicas > 1 else (),
            choose=choose,
            gloo=self.gloo,
            micro_batches=self.micro_batches,
        )
        if self.learning_rate is None or not plan.exact:
            return plan
        return plan.at_learning_rate(self.learning_rate)

    def _between_sites(self, policy: Policy) -> Plan:
        """Plan a policy between sites that each hold the model, sharded by FSDP2."""
        if self.sites < 2:
            raise PolicyError(f"policy {policy.name!r} is for sites: give their number, at least 2")
        if self.world_size % self.sites:
            raise ModelError(f"{self.world_size} ranks do not divide among {self.sites} sites")
        reduces, _ = self.shapes.units(self.world_size // self.sites, torch.float32, torch.float32)
        units = [between_sites(unit, self.sites) for unit in reduces if unit.params]
        return build_plan(units, policy)


def explain(
    model: nn.Module | Mapping[str, Sequence[int]],
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy = "hybrid",
    *,
    world_size: int,
    replicas: int = 1,
    sites: int = 1,
    ddp: bool = False,
    ranks_per_host: int | None = None,
    dtype: torch.dtype | None = None,
    parameter_dtype: torch.dtype | None = None,
    link: Link | None = None,
    micro_batches: int = 1,
) -> Plan:
    """The plan that ``tagc.wrap`` or ``tagc.sites`` would make, if ``fully_shard`` were applied to
    every transformer block of the model and then to the model, or the model were in
    ``DistributedDataParallel``. (Blocks are the children of its ``nn.ModuleList``.)

    Args:
        model: a module on any device, including meta, whose parameters tensor parallelism may have
            divided, but not FSDP; or shapes by parameter name.
        policy: see :func:`tagc.wrap`.
        world_size: total number of ranks.
        replicas: number of copies of the sharded model.
        sites: number of sites, for a policy with a section ``sites``.
        ddp: whether the model is in ``DistributedDataParallel`` instead of sharded.
        ranks_per_host: if a copy spans several hosts with several ranks each, the ranks of a host
            add up their gradients first; default: the link's value, or 1.
        dtype: dtype of the gradients that FSDP or DDP reduces; default: that of the parameters, or
            float32 for shapes.
        parameter_dtype: dtype of the parameters that FSDP gathers; the same default. DDP gathers
            none.
        link: the link for the choices of ``codec: auto``, which do not include codec time.
        micro_batches: backwards in an optimizer step. FSDP gathers parameters again in each.

    Raises:
        ValueError: if there are no micro-batches; if the ranks do not divide among the replicas, or
            among the hosts; with ``ddp`` also for a policy for sites, and if trained parameters are
            of several dtypes.
        tagc.PolicyError: as in :func:`tagc.wrap`, and for ``codec: auto`` without a link.
    """
    if world_size < 1 or replicas < 1 or world_size % replicas:
        raise ValueError(f"{world_size} ranks do not divide among {replicas} replicas")
    if ranks_per_host is None:
        ranks_per_host = 1 if link is None else link.ranks_per_host
    if ranks_per_host < 1 or world_size % ranks_per_host:
        raise ValueError(f"{world_size} ranks do not divide among hosts of {ranks_per_host}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be 1 or more, not {micro_batches}")
    loaded = Policy.load(policy)
    if loaded.sites is not None and ddp:
        raise ValueError(
            f"policy {loaded.name!r} is for sites, and with it only shards of FSDP2 can be "
            "planned: leave ddp out"
        )
    if loaded.sites is None and sites != 1:
        raise PolicyError(
            f"policy {loaded.name!r} has no section sites: leave out the number of sites, or "
            "choose the built-in policy sites"
        )
    own = _dtype(model, alike=ddp and dtype is None)
    plan = Setting(
        shapes=ModelShapes.of(model),
        world_size=world_size,
        replicas=replicas,
        sites=sites,
        ranks_per_host=ranks_per_host,
        ddp=ddp,
        dtype=dtype or own,
        parameter_dtype=parameter_dtype or own,
        micro_batches=micro_batches,
    ).plan(loaded, link=link)
    for warning in plan.warnings:
        warn(warning)
    return plan


def _dtype(model: nn.Module | Mapping[str, Sequence[int]], *, alike: bool) -> torch.dtype:
    """The dtype of the parameters; ``alike``: which all trained parameters must have."""
    if not isinstance(model, nn.Module):
        return torch.float32
    if not alike:
        return next(model.parameters()).dtype
    dtypes = list(dict.fromkeys(p.dtype for p in model.parameters() if p.requires_grad))
    if len(dtypes) != 1:
        raise ValueError(
            f"the trained parameters are of {len(dtypes)} dtypes ({as_list([*map(str, dtypes)])}), "
            "but DDP can be planned for one only: give dtype"
        )
    return dtypes[0]


def plan_data(shapes: ModelShapes, plan: Plan) -> dict[str, Any]:
    """A plan as data for JSON: the bytes that a rank sends and stores, with equal blocks merged."""
    return {
        "model": shapes.data,
        "policy": plan.policy.name,
        "warmup_steps": plan.warmup_steps,
        "micro_batches": plan.micro_batches,
        "sent": {
            direction: {"wire_bytes": wire, "dense_bytes": dense}
            for direction, (wire, dense) in plan.sent.items()
        },
        "memory": {**asdict(plan.memory), "peak": plan.memory.peak},
        "notes": [*plan.about_exact, *plan.notes],
        "warnings": list(plan.warnings),
        "rows": [asdict(row) for row in merged(plan.rows)],
    }

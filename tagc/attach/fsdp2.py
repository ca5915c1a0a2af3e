"""FSDP2, ``fully_shard`` and ``replicate``: how a model's units are found, and what their parameter
groups call instead of FSDP's own collectives.

Only this file and :mod:`tagc.attach.fsdp2_collectives` know ``fully_shard``'s internals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from tagc.attach.fsdp2_collectives import (
    CheckedAllGather,
    CustomAllGather,
    CustomReduceScatter,
    GradMode,
    all_reduces_by_class,
)
from tagc.attach.unit import Integration, Unit, already_wrapped, ranks_of
from tagc.attach.whole import check_policy, reduce_whole
from tagc.collect import CollectiveWork, ReplicaAverage, Transport, UnitGatherer, UnitReducer
from tagc.plan import Box, UnitInfo, UnitParam, span_of
from tagc.policy.roles import plain_name


@dataclass(frozen=True, kw_only=True)
class FSDP2Unit(Unit):
    """One communication unit of a ``fully_shard``-ed model.

    Attributes:
        _names: of FSDP's parameters, including frozen ones, by their ids.
        _native: FSDP's own reduce-scatter, all-gather and all-reduce hook.
    """

    captures = True

    _param_group: Any
    _names: Mapping[int, str]
    _native: tuple[Any, Any, Any]
    _grad_mode: GradMode
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def reached(self) -> Set[str] | None:
        reduce_scatter = self._param_group._reduce_scatter_comm
        return reduce_scatter.reached if isinstance(reduce_scatter, CustomReduceScatter) else None

    def install(self, reducer: UnitReducer) -> None:
        planned = frozenset(param.name for param in self.info.params)
        # As FSDPModule's setters do, which refuse modules with several parameter groups.
        self._param_group._reduce_scatter_comm = CustomReduceScatter(reducer, self._names, planned)
        if _is_own(self._native[1]) and Transport(self.group).by_messages(self.device):
            self._param_group._all_gather_comm = CheckedAllGather(self._native[1], self)

    def check_own(self, *, gather: bool, average: bool) -> None:
        if average and self.replicas is None and self._native[2] is not None:
            raise ValueError(
                "the model has its own all-reduce hook (set_all_reduce_hook), which averaging "
                "over replicas would replace; remove it, or leave replicas out of tagc.wrap"
            )
        if gather:
            _check_own(self.info.name, self._native[1], "all-gather")

    def install_gather(self, gatherer: UnitGatherer) -> None:
        all_gather = CustomAllGather(gatherer, self._param_group, self._grad_mode)
        self._param_group._all_gather_comm = all_gather
        for module in self._param_group.modules:
            # Before FSDP's own hook, which gathers.
            hook = module.register_forward_pre_hook(all_gather.before_forward, prepend=True)
            self._hooks.append(hook)

    def send_ahead(self, gatherer: UnitGatherer) -> None:
        shard = self.shard()
        out = shard.new_empty(gatherer.plan.info.world_size * len(shard))
        self._param_group._all_gather_comm.send_ahead(out, shard, self.group)

    def install_all_reduce(self, average: ReplicaAverage) -> None:
        if self.replicas is None:
            self._param_group._all_reduce_hook = average
            return
        reduce_scatter = self._param_group._reduce_scatter_comm
        assert isinstance(reduce_scatter, CustomReduceScatter)
        reduce_scatter.average = average

    @property
    def all_reduces(self) -> bool:
        return self._param_group.all_reduce_grads

    def trainable(self) -> list[nn.Parameter]:
        return [p.sharded_param for p in self._planned()]

    def gathered(self) -> list[nn.Parameter]:
        """The objects that stand for :meth:`trainable` in the model while they are gathered; FSDP
        makes them in its first forward."""
        found = [getattr(p, "_unsharded_param", None) for p in self._planned()]
        return [param for param in found if param is not None]

    def _planned(self) -> list[Any]:
        # Not those that require a gradient now: users may freeze parameters later.
        planned = {param.name for param in self.info.params}
        return [p for p in self._param_group.fsdp_params if self._names[id(p)] in planned]

    def frozen_shards(self) -> dict[str, Tensor]:
        assert self.gather_info is not None
        pairs = zip(self.gather_info.params, self._param_group.fsdp_params, strict=True)
        return {
            info.name: param.sharded_param.to_local().detach().to(self.gather_info.dtype)
            for info, param in pairs
            if info.frozen
        }

    def shard(self) -> Tensor:
        shards = [p._sharded_param_data.detach() for p in self._param_group.fsdp_params]
        assert self.gather_info is not None
        sizes = [len(shard) for shard in shards]
        shard = torch.empty(sum(sizes), dtype=self.gather_info.dtype, device=self.device)
        # As FSDP casts them: NaNs may have other bits after other casts.
        torch._foreach_copy_(shard.split(sizes), shards)
        return shard

    def restore(self) -> None:
        group = self._param_group
        group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook = self._native
        while self._hooks:
            self._hooks.pop().remove()


@dataclass(frozen=True, kw_only=True)
class ReplicatedUnit(FSDP2Unit):
    """One communication unit of a model that ``replicate`` was applied to.

    FSDP2 copies its gradients into a buffer, and calls ``torch.distributed.all_reduce`` on it. It
    adds up micro-batches with ``set_requires_gradient_sync(False)`` itself, and gathers nothing.
    """

    def install(self, reducer: UnitReducer) -> None:
        super().install(reducer)
        self._param_group._reduce_scatter_comm.average = partial(self._average, reducer)

    def _average(self, reducer: UnitReducer, buffer: Tensor, op: Any) -> None:
        reached = self.reached
        if reducer.plan.rows == 1:  # the buffer is what is sent
            reducer.reduce(buffer, buffer, self.group, op, _natively, reached=reached)
            return
        params = [p for p in self.info.params if reached is None or p.name in reached]
        shapes = [p.local_shape for p in params]
        pieces = buffer.split([math.prod(shape) for shape in shapes])
        views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        reduce_whole(reducer, views, self.group, op, _natively, reached=reached)


def _natively(
    out: Tensor, inp: Tensor, transport: Transport, op: dist.ReduceOp.RedOpType
) -> CollectiveWork:
    """As FSDP2 does it, in place."""
    return transport.all_reduce(out, op)


def find_units(model: nn.Module) -> list[Unit]:
    """The FSDP2 units of a model, in module order. A module whose parameters have several meshes
    (experts have their own) is a unit for each."""
    # Policies use the names of the model as written.
    modules = [(plain_name(f"{n}.").removesuffix("."), m) for n, m in model.named_modules()]
    names = {id(module): name for name, module in modules}
    groups = _param_groups(model)
    dims = (dim for group in groups for p in group.fsdp_params for dim in _parallel_dims(p, group))
    everywhere = list(dict.fromkeys(dim.ranks for dim in dims))
    units: list[Unit] = []
    seen: set[int] = set()
    above: set[str] = set()
    grad_mode = GradMode()
    for name, module in modules:
        for i, group in enumerate(param_groups_of(module)):
            if id(group) in seen:
                continue
            seen.add(id(group))
            label = f"{name or '(root)'} (group {i + 1})" if i else name
            _check_reduction(label, group)
            params = [_unit_param(p, group, names, everywhere) for p in group.fsdp_params]
            inside = name and any(name.startswith(prefix) for prefix in above)
            units.append(_unit(label, module, group, params, grad_mode, is_topmost=not inside))
        if isinstance(module, FSDPModule):
            above.add(f"{name}." if name else "")
    return units


def _unit(
    name: str,
    module: Any,
    group: Any,
    params: Sequence[UnitParam],
    grad_mode: GradMode,
    *,
    is_topmost: bool,
) -> FSDP2Unit:
    """The unit of a parameter group of ``module``; ``params`` are its parameters, in FSDP's order.

    Args:
        is_topmost: whether no module above is sharded.
    """
    mesh = group.mesh_info
    shards, copies = (hasattr(mesh, f"{kind}_mesh_size") for kind in ("shard", "replicate"))
    if copies and not all_reduces_by_class():
        raise ValueError(
            f"{name or 'the root module'!r} is replicated (replicate(), or HSDP), and tagc cannot "
            "replace the all-reduce of this version of torch; use DistributedDataParallel, or "
            "fully_shard over the sharded dimension of the mesh only and tagc.wrap(..., "
            "replicas=mesh[...]) over the other one"
        )
    info = UnitInfo(
        name=name,
        params=tuple(param for param in params if not param.frozen),
        world_size=mesh.shard_mesh_size if shards else mesh.replicate_mesh_size,
        dtype=reduce_dtype(name, group),
        replicated=not shards,
    )
    dims = (dim for p in group.fsdp_params for dim in _parallel_dims(p, group))
    fields: dict[str, Any] = {
        "info": info,
        "device": group.device,
        "parallel": [dim.group for dim in dims],
        "_param_group": group,
        "_names": {id(p): at.name for p, at in zip(group.fsdp_params, params, strict=True)},
        "_grad_mode": grad_mode,
        "_native": (group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook),
    }
    if not shards:
        return ReplicatedUnit(group=mesh.replicate_process_group, **fields)
    dtypes = {param_dtype(p, group) or p.sharded_param.dtype for p in group.fsdp_params}
    # FSDP decides in the first forward that its root keeps its parameters until backward. Before
    # that, a part of a larger model that is wrapped alone is mistaken for the root.
    state = module._get_fsdp_state()
    is_root = is_topmost if state._is_root is None else state._is_root
    keeps = is_root and getattr(state, "_auto_reshard_after_forward", False)
    # If resharded to a smaller group, backward gathers natively in that group.
    again = group._reshard_after_forward and not group._use_post_forward_mesh and not keeps
    return FSDP2Unit(
        gather_info=UnitInfo(
            name=name,
            params=tuple(params),
            world_size=info.world_size,
            # FSDP gathers several dtypes as bytes.
            dtype=dtypes.pop() if len(dtypes) == 1 else torch.uint8,
            per_step=2 if again else 1,
            native=_own_gather(group),
        ),
        group=mesh.shard_process_group,
        replicas=mesh.replicate_process_group if copies else None,
        **fields,
    )


def param_groups_of(module: nn.Module) -> list[Any]:
    """FSDP's parameter groups of a module; none if it is not sharded."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    # torch 2.13 has a list, 2.11 at most one.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g is not None] if groups is None else groups


def param_dtype(param: Any, group: Any) -> torch.dtype | None:
    """The dtype to which FSDP casts a parameter before it gathers it; None if it does not."""
    # Before torch 2.15 a group has one policy, then every parameter its own.
    return getattr(group, "mp_policy", param.mp_policy).param_dtype


def reduce_dtype(name: str, group: Any) -> torch.dtype:
    """The dtype in which FSDP reduces a unit's gradients."""
    # Frozen parameters may have another dtype than those that are reduced.
    params = [p for p in group.fsdp_params if p.sharded_param.requires_grad] or group.fsdp_params
    policy = getattr(group, "mp_policy", None)
    if policy is not None:  # before torch 2.15, which refuses several dtypes itself
        return policy.reduce_dtype or policy.param_dtype or params[0].sharded_param.dtype
    dtypes = {p.sharded_grad_dtype for p in params}
    if len(dtypes) > 1 or None in dtypes:
        raise ValueError(
            f"the gradients of {name or 'the root module'!r} have several dtypes "
            f"({', '.join(sorted(map(str, dtypes)))}), which FSDP sends in an order of its own: "
            "call fully_shard on the parameters of each dtype apart, and leave their grad_dtype "
            "unset"
        )
    return params[0].mp_policy.reduce_dtype or dtypes.pop()


def _own_gather(group: Any) -> str:
    """Why FSDP must gather a unit itself: a parameter's own class encodes and decodes it (torchao's
    float8 all-gather). Empty if no parameter does that."""
    for param in group.fsdp_params:
        local = param._sharded_local_tensor
        if hasattr(local, "fsdp_pre_all_gather"):
            return f"parameters of type {type(local).__name__} have their own all-gather"
    return ""


def _is_own(comm: Any) -> bool:
    """Whether a collective is FSDP's own."""
    return type(comm).__module__.startswith("torch.")


def _check_reduction(name: str, group: Any) -> None:
    if isinstance(group._reduce_scatter_comm, CustomReduceScatter):
        raise already_wrapped(repr(name or "the root module"))
    _check_own(name, group._reduce_scatter_comm, "reduce-scatter")


def _check_own(name: str, comm: Any, kind: str) -> None:
    if not _is_own(comm):
        raise ValueError(
            f"{name or 'the root module'!r} has its own {kind}, {type(comm).__name__} (from "
            f"set_custom_{kind.replace('-', '_')}), which tagc would replace; remove it, or do "
            "not wrap the model"
        )


def _sharding(group: Any) -> list[dist.ProcessGroup]:
    """FSDP's own groups of a parameter group."""
    names = ("shard_process_group", "replicate_process_group")
    found = [getattr(group.mesh_info, name, None) for name in names]
    return [one for one in found if one is not None]


def _unit_param(
    param: Any, group: Any, names: Mapping[int, str], everywhere: Sequence[tuple[int, ...]]
) -> UnitParam:
    """What the plan knows of an FSDP parameter. A shared one has the name that FSDP uses.

    ``named_parameters`` does not serve for names: between forward and backward the module holds
    another, unsharded object under this name.
    """
    name, owner = param._module_info.param_name, names.get(id(param._module_info.module))
    if owner is None:
        raise ValueError(
            f"FSDP shards parameter {name!r} together with this model, but outside of it "
            "(fully_shard of a list of modules); wrap the model that holds all of them"
        )
    dims, shape = _parallel_dims(param, group), tuple(param.sharded_param.shape)
    return UnitParam(
        name=f"{owner}.{name}" if owner else name,
        shape=shape,
        box=_box_of(shape, dims),
        duplicate=_duplicate_of(dims, _sharding(group), everywhere),
        columns=param.padded_sharded_param_size.numel(),
        dim=param.fsdp_placement.dim,
        local=tuple(param.padded_sharded_param_size),
        frozen=not param.sharded_param.requires_grad,
    )


# The part of a parameter that tensor parallelism gave a rank, before FSDP sharded it. This reads
# only public attributes of DTensor: the mesh of a sharded parameter has FSDP's dimensions and those
# of tensor (or expert) parallelism.


class _ParallelDim(NamedTuple):
    """A dimension of a parameter's mesh that is not FSDP's: this rank's group along it, the group's
    ranks, and the dimension of the parameter that it divides. None if it does not divide it;
    subclasses of ``Shard``, which divide differently, do not count."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    divides: int | None


def _parallel_dims(param: Any, group: Any) -> list[_ParallelDim]:
    sharded = param.sharded_param
    if not isinstance(sharded, DTensor):
        return []
    own = {ranks_of(one) for one in _sharding(group)}
    dims = []
    for i, placement in enumerate(sharded.placements):
        along = sharded.device_mesh.get_group(i)
        divides = placement.dim % sharded.ndim if type(placement) is Shard else None
        dims.append(_ParallelDim(along, ranks_of(along), divides))
    return [dim for dim in dims if dim.ranks not in own]


def _box_of(shape: tuple[int, ...], dims: Iterable[_ParallelDim]) -> Box | None:
    """The part of a parameter of this ``shape`` that the dimensions leave this rank's sharding
    group; None if they do not divide it."""
    box, divided = Box.whole(shape), False
    for group, ranks, along in dims:
        if along is not None:
            box = box.narrow(along, *span_of(box.shape[along], group.rank(), len(ranks)))
            divided |= len(ranks) > 1
    # All ranks return a box or none does, even if it is empty or whole on one of them.
    return box if divided else None


def _duplicate_of(
    dims: Iterable[_ParallelDim],
    sharding: Iterable[dist.ProcessGroup],
    everywhere: Sequence[tuple[int, ...]],
) -> tuple[int, int] | None:
    """Index of this rank's sharding group among the groups that hold the same elements of a
    parameter, and the number of these groups; None if there is only one.

    ``everywhere`` are the ranks along the dimensions of all parameters of the model. A dimension
    that the parameter's own mesh lacks also makes duplicates, unless the other groups divide the
    parameter among these ranks.
    """
    me = dist.get_rank()
    busy = {rank for group in sharding for rank in ranks_of(group)}
    busy.update(rank for dim in dims if dim.divides is not None for rank in dim.ranks)
    index, count = 0, 1
    for ranks in everywhere:
        if busy & {*ranks} == {me}:
            index, count = index * len(ranks) + ranks.index(me), count * len(ranks)
            busy.update(ranks)
    return None if count == 1 else (index, count)


def _param_groups(model: nn.Module) -> list[Any]:
    return [group for module in model.modules() for group in param_groups_of(module)]


def _groups(model: nn.Module) -> list[dist.ProcessGroup]:
    return [one for group in _param_groups(model) for one in _sharding(group)]


def _shards(model: nn.Module) -> bool:
    if groups := _param_groups(model):
        return any(hasattr(group.mesh_info, "shard_mesh_size") for group in groups)
    # A model that has no parameters to share may be either.
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _replicates(model: nn.Module) -> bool:
    groups = _param_groups(model)
    return any(not hasattr(group.mesh_info, "shard_mesh_size") for group in groups)


FSDP2 = Integration(
    name="FSDP2",
    description="FSDP2 (fully_shard)",
    shards=_shards,
    sharding_groups=_groups,
    find_units=find_units,
    # It supports everything that a policy can ask for.
    check_policy=lambda policy, replicas: None,
)

REPLICATE = Integration(
    name="replicate",
    description="replicate (torch.distributed._composable.replicate_with_fsdp)",
    shards=_replicates,
    sharding_groups=_groups,
    find_units=find_units,
    check_policy=check_policy,
)

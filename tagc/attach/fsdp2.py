"""FSDP2: how a model's units are found, and what their parameter groups are told to call.

Only this file and :mod:`tagc.attach.fsdp2_collectives` know ``fully_shard``'s internals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from tagc.attach.averaging import all_reduces_by_class
from tagc.attach.fsdp2_collectives import CustomAllGather, CustomReduceScatter, InStep
from tagc.attach.grad_mode import GradMode
from tagc.attach.tensor_parallel import ParallelDim, box_of, duplicate_of, parallel_dims
from tagc.attach.unit import Integration, Unit
from tagc.collect import ReplicaAverage, Transport, UnitGatherer, UnitReducer
from tagc.plan import UnitInfo, UnitParam
from tagc.policy import Policy

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, kw_only=True)
class FSDP2Unit(Unit):
    """One communication unit of a ``fully_shard``-ed model.

    Attributes:
        _names: of FSDP's parameters, including frozen ones, by their ids.
    """

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
            self._param_group._all_gather_comm = InStep(self._native[1], self)

    def check_gather(self) -> None:
        check_own(self.info.name, self._native[1], "all-gather")

    def install_gather(self, gatherer: UnitGatherer) -> None:
        all_gather = CustomAllGather(gatherer, self._param_group, self._grad_mode)
        self._param_group._all_gather_comm = all_gather
        for module in self._param_group.modules:
            # Before FSDP's own hook, which gathers.
            hook = module.register_forward_pre_hook(all_gather.before_forward, prepend=True)
            self._hooks.append(hook)

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

    @property
    def has_all_reduce_hook(self) -> bool:
        return self._native[2] is not None

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
        return torch.cat(shards).to(self.device, self.gather_info.dtype)

    def restore(self) -> None:
        group = self._param_group
        group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook = self._native
        while self._hooks:
            self._hooks.pop().remove()


def sharding_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of ranks that share a model, even an invalid one; none if it is not sharded."""
    groups = [group for m in model.modules() for g in param_groups_of(m) for group in _sharding(g)]
    return list({id(group): group for group in groups}.values())


MakeUnit = Callable[
    [str, nn.Module, Any, dict[int, str], GradMode, bool, Sequence[ParallelDim]], FSDP2Unit
]
"""Makes a unit of its name, module and parameter group, the names of all modules, the mode of
gradients, whether no module above is sharded, and tensor-parallel dimensions."""


def find_units(model: nn.Module, make: MakeUnit | None = None) -> list[Unit]:
    """The FSDP2 units of a model, in module order, with their trainable parameters. A module whose
    parameters have several meshes (experts have their own) is a unit for each.

    Args:
        make: makes the unit of a parameter group; default: one that is sharded.

    Raises:
        ValueError: if a unit's reduce-scatter cannot be replaced, or already is.
    """
    modules = [(plain_name(name), module) for name, module in model.named_modules()]
    names = {id(module): name for name, module in modules}
    units: list[Unit] = []
    seen: set[int] = set()
    grad_mode = GradMode()
    groups = [group for _, module in modules for group in param_groups_of(module)]
    dims = (dim for group in groups for p in group.fsdp_params for dim in parallel_of(p, group))
    parallel = list({dim.ranks: dim for dim in dims}.values())
    for name, module, is_topmost in _with_topmost(modules):
        for group in param_groups_of(module):
            if id(group) not in seen:
                seen.add(id(group))
                found = make or _unit
                units.append(found(name, module, group, names, grad_mode, is_topmost, parallel))
    return units


def is_replicated(module: nn.Module) -> bool:
    """Whether a module is on FSDP2's machinery without being sharded (``replicate``)."""
    return any(not hasattr(g.mesh_info, "shard_mesh_size") for g in param_groups_of(module))


def _is_sharded(module: nn.Module) -> bool:
    return any(hasattr(g.mesh_info, "shard_mesh_size") for g in param_groups_of(module))


def _with_topmost(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Name and module, parents first, and whether no module above it is sharded."""
    above: set[str] = set()
    for name, module in modules:
        parts = name.split(".") if name else []
        inside = any(".".join(parts[:end]) in above for end in range(len(parts)))
        yield name, module, not inside
        if isinstance(module, FSDPModule):
            above.add(name)


def plain_name(name: str) -> str:
    """A name without the parts that ``torch.compile`` and activation checkpointing insert, because
    policies use the names of the model as written."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def param_groups_of(module: nn.Module) -> list[Any]:
    """FSDP's parameter groups of a module; none if it is not sharded."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    # torch 2.13 has a list, 2.11 at most one.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g is not None] if groups is None else groups


def _unit(
    name: str,
    module: nn.Module,
    group: Any,
    names: dict[int, str],
    grad_mode: GradMode,
    is_topmost: bool,
    parallel: Sequence[ParallelDim],
) -> FSDP2Unit:
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    name = unit_name(name, module, group)
    trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    mesh = group.mesh_info
    replicated = hasattr(mesh, "replicate_mesh_size") and hasattr(mesh, "shard_mesh_size")
    if replicated and not all_reduces_by_class():
        raise ValueError(_in_one_dimension(name, mesh))
    check_reduction(name, group)
    gathered = {param_dtype(p, group) or p.sharded_param.dtype for p in group.fsdp_params}
    # FSDP decides in the first forward that its root keeps its parameters until backward. Before
    # that, a part of a larger model that is wrapped alone is mistaken for the root.
    is_root = is_topmost if state._is_root is None else state._is_root
    root = is_root and getattr(state, "_auto_reshard_after_forward", False)
    planned = {id(p): unit_param(p, group, names, parallel) for p in group.fsdp_params}
    return FSDP2Unit(
        info=UnitInfo(
            name=name,
            params=tuple(planned[id(p)] for p in trainable),
            world_size=mesh.shard_mesh_size,
            dtype=reduce_dtype(name, group),
        ),
        gather_info=UnitInfo(
            name=name,
            params=tuple(planned.values()),
            world_size=mesh.shard_mesh_size,
            # FSDP gathers several dtypes as bytes.
            dtype=gathered.pop() if len(gathered) == 1 else torch.uint8,
            # If resharded to a smaller group, backward gathers natively in that group.
            per_step=(
                2
                if group._reshard_after_forward and not group._use_post_forward_mesh and not root
                else 1
            ),
            native=_own_gather(group),
        ),
        group=mesh.shard_process_group,
        device=group.device,
        replicas=mesh.replicate_process_group if replicated else None,
        parallel=[dim.group for p in group.fsdp_params for dim in parallel_of(p, group)],
        _param_group=group,
        _names={id(p): planned[id(p)].name for p in group.fsdp_params},
        _grad_mode=grad_mode,
        _native=(group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook),
    )


def param_dtype(param: Any, group: Any) -> torch.dtype | None:
    """The dtype to which FSDP casts a parameter before it gathers it; None if it does not."""
    # Before torch 2.15 a group has one policy, then every parameter its own.
    return getattr(group, "mp_policy", param.mp_policy).param_dtype


def reduce_dtype(name: str, group: Any) -> torch.dtype:
    """The dtype in which FSDP reduces a unit's gradients.

    Raises:
        ValueError: if its gradients have several dtypes, whose columns FSDP orders by dtype.
    """
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


def unit_name(name: str, module: nn.Module, group: Any) -> str:
    """The name of a unit: its module's, with a number for further parameter groups."""
    place = param_groups_of(module).index(group)
    return f"{name or '(root)'} (group {place + 1})" if place else name


def _own_gather(group: Any) -> str:
    """Why FSDP must gather a unit itself: a parameter's own class encodes and decodes it (torchao's
    float8 all-gather). Empty if no parameter does that."""
    for param in group.fsdp_params:
        local = param._sharded_local_tensor
        if hasattr(local, "fsdp_pre_all_gather"):
            return f"parameters of type {type(local).__name__} have their own all-gather"
    return ""


def _in_one_dimension(name: str, info: Any) -> str:
    """Text on what to change if FSDP's own all-reduce over replicas cannot be replaced."""
    mesh = info.mesh
    dims = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    sizes = ", ".join(f"{dim}={size}" for dim, size in zip(dims, mesh.shape, strict=True))
    replicate, shard = dims[info.replicate_mesh_dim], dims[info.shard_mesh_dim]
    return (
        f"{name or 'the root module'!r} is sharded and replicated over a mesh of ({sizes}) (HSDP), "
        "and tagc cannot replace the all-reduce of this version of torch. Change two lines:\n"
        f'    fully_shard(module, mesh=mesh["{shard}"])\n'
        f'    tagc.wrap(model, ..., replicas=mesh["{replicate}"])'
    )


def _is_own(comm: Any) -> bool:
    """Whether a collective is FSDP's own."""
    return type(comm).__module__.startswith("torch.")


def check_reduction(name: str, group: Any) -> None:
    """Raise ValueError if a unit's reduction cannot be replaced."""
    if isinstance(group._reduce_scatter_comm, CustomReduceScatter):
        raise ValueError(
            f"{name or 'the root module'!r} is already wrapped, by itself or as a part of another "
            "model; call tagc.compressor(that_model).remove() first"
        )
    check_own(name, group._reduce_scatter_comm, "reduce-scatter")


def check_own(name: str, comm: Any, kind: str) -> None:
    """Raise ValueError if a collective that tagc would replace is not FSDP's own."""
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


def parallel_of(param: Any, group: Any) -> list[ParallelDim]:
    """The tensor-parallel dimensions of an FSDP parameter."""
    return parallel_dims(param.sharded_param, _sharding(group))


def unit_param(
    param: Any, group: Any, names: dict[int, str], parallel: Sequence[ParallelDim]
) -> UnitParam:
    """What the plan knows of an FSDP parameter."""
    dims, shape = parallel_of(param, group), tuple(param.sharded_param.shape)
    return UnitParam(
        name=param_name(param, names),
        shape=shape,
        box=box_of(shape, dims),
        duplicate=duplicate_of(dims, _sharding(group), parallel),
        columns=param.padded_sharded_param_size.numel(),
        dim=param.fsdp_placement.dim,
        local=tuple(param.padded_sharded_param_size),
        frozen=not param.sharded_param.requires_grad,
    )


def param_name(param: Any, names: dict[int, str]) -> str:
    """Qualified name of an FSDP parameter; a shared parameter has the name that FSDP uses.

    ``named_parameters`` does not serve: between forward and backward the module holds another,
    unsharded object under this name.
    """
    owner = names.get(id(param._module_info.module))
    if owner is None:
        raise ValueError(
            f"FSDP shards parameter {param._module_info.param_name!r} together with this model, "
            "but outside of it (fully_shard of a list of modules); wrap the model that holds all "
            "of them"
        )
    return f"{owner}.{param._module_info.param_name}" if owner else param._module_info.param_name


def _shards(model: nn.Module) -> bool:
    # A model that has no parameters to share may be either.
    found = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return bool(found) and (not any(map(param_groups_of, found)) or any(map(_is_sharded, found)))


def _check_policy(policy: Policy, replicas: bool) -> None:
    """FSDP2 supports everything that a policy can ask for."""


FSDP2 = Integration(
    name="FSDP2",
    spelled="FSDP2 (fully_shard)",
    shards=_shards,
    sharding_groups=sharding_groups,
    find_units=find_units,
    check_policy=_check_policy,
)

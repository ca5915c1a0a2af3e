"""FSDP2: the one file that knows ``fully_shard``'s internals."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils.hooks import RemovableHandle

from tagc.comm import Lockstep, Phase, ReplicaAverage, UnitGatherer, UnitReducer
from tagc.fsdp.averaging import all_reduces_by_class, averaging, plain
from tagc.fsdp.grad_mode import GradMode
from tagc.fsdp.tensor_parallel import ParallelDim, box_of, duplicate_of, parallel_dims
from tagc.fsdp.unit import Integration, Unit
from tagc.plan import UnitInfo, UnitParam
from tagc.policy import Policy

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, kw_only=True)
class FSDP2Unit(Unit):
    """One communication unit of a ``fully_shard``-ed model."""

    module: FSDPModule
    _param_group: Any
    _native: tuple[Any, Any, Any]
    _grad_mode: GradMode
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def unused_parameters_remedy(self) -> str:
        """See :attr:`Unit.unused_parameters_remedy`."""
        return unused_parameters_remedy()

    def without_gradient(self) -> Sequence[str]:
        """See :meth:`Unit.without_gradient`."""
        reduced = _reduced_now()
        if reduced is None:
            return ()
        present = {id(param) for param in reduced}
        assert self.gather_info is not None
        params = zip(self.gather_info.params, self._param_group.fsdp_params, strict=True)
        planned = {param.name for param in self.info.params}
        return [p.name for p, fsdp in params if p.name in planned and id(fsdp) not in present]

    def install(self, reducer: UnitReducer) -> None:
        """See :meth:`Unit.install`."""
        self.module.set_custom_reduce_scatter(_CustomReduceScatter(reducer))
        if _is_own(self._native[1]):
            self.module.set_custom_all_gather(_InStep(self._native[1], self))

    def check_gather(self) -> None:
        """See :meth:`Unit.check_gather`."""
        _check_own(self.info.name, self._native[1], "all-gather")

    def install_gather(self, gatherer: UnitGatherer) -> None:
        """See :meth:`Unit.install_gather`."""
        all_gather = _CustomAllGather(gatherer, self._param_group, self._grad_mode)
        self.module.set_custom_all_gather(all_gather)
        for module in self._param_group.modules:
            # Before FSDP's own hook, which gathers.
            hook = module.register_forward_pre_hook(self._grad_mode.note, prepend=True)
            self._hooks.append(hook)

    def install_all_reduce(self, average: ReplicaAverage) -> None:
        """See :meth:`Unit.install_all_reduce`."""
        if self.replicas is None:
            self.module.set_all_reduce_hook(average)
            return
        reduce_scatter = self._param_group._reduce_scatter_comm
        assert isinstance(reduce_scatter, _CustomReduceScatter)
        reduce_scatter.average = average

    @property
    def all_reduces(self) -> bool:
        """See :attr:`Unit.all_reduces`."""
        return self._param_group.all_reduce_grads

    @property
    def has_all_reduce_hook(self) -> bool:
        """See :attr:`Unit.has_all_reduce_hook`."""
        return self._native[2] is not None

    def trainable(self) -> list[nn.Parameter]:
        """See :meth:`Unit.trainable`."""
        params = [p.sharded_param for p in self._param_group.fsdp_params]
        return [p for p in params if p.requires_grad]

    def frozen_shards(self) -> dict[str, Tensor]:
        """See :meth:`Unit.frozen_shards`."""
        assert self.gather_info is not None
        pairs = zip(self.gather_info.params, self._param_group.fsdp_params, strict=True)
        return {
            info.name: param.sharded_param.to_local().detach().to(self.gather_info.dtype)
            for info, param in pairs
            if info.frozen
        }

    def shard(self) -> Tensor:
        """See :meth:`Unit.shard`."""
        shards = [p._sharded_param_data.detach() for p in self._param_group.fsdp_params]
        assert self.gather_info is not None
        return torch.cat(shards).to(self.device, self.gather_info.dtype)

    def restore(self) -> None:
        """See :meth:`Unit.restore`."""
        reduce_scatter, all_gather, hook = self._native
        self.module.set_custom_reduce_scatter(reduce_scatter)
        self.module.set_custom_all_gather(all_gather)
        self.module.set_all_reduce_hook(hook)
        while self._hooks:
            self._hooks.pop().remove()


class _Allocates:
    """FSDP asks the collective for its buffers."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CustomReduceScatter(_Allocates, ReduceScatter):
    """Also gives FSDP the tensors that it all-reduces, which see to that themselves.

    Attributes:
        average: over replicas, in place of FSDP's own all-reduce; None where there is none.
    """

    def __init__(self, reducer: UnitReducer) -> None:
        self._reduce = reducer.reduce
        self.average: ReplicaAverage | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        buffer = super().allocate(size, dtype=dtype, device=device)
        return buffer if self.average is None else averaging(buffer, self.average)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._reduce(plain(output_tensor), plain(input_tensor), group, op)


class _InStep(AllGather):
    """FSDP's own all-gather, with all ranks at the same one: it would take any message that comes
    for the one that it waits for, and so keep others from seeing a mix-up."""

    def __init__(self, native: AllGather, unit: FSDP2Unit) -> None:
        self._native = native
        self._lockstep = Lockstep("parameters", unit.info.label, unit.device)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self._native.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._lockstep.check(group, 0)
        return self._native(output_tensor, input_tensor, group, async_op)


class _CustomAllGather(_Allocates, AllGather):
    def __init__(self, gatherer: UnitGatherer, param_group: Any, grad_mode: GradMode) -> None:
        self._gather, self._param_group = gatherer.gather, param_group
        self._grad_mode = grad_mode

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        self._gather(output_tensor, input_tensor, group, self._phase())

    def _phase(self) -> Phase:
        # The state is the same on every rank, for prefetched units, too.
        state = self._param_group._training_state.name
        if state == "PRE_BACKWARD":
            return Phase.BACKWARD
        recorded = state == "FORWARD" and self._grad_mode.enabled
        return Phase.FORWARD if recorded else Phase.OTHER


def sharding_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of ranks that share a model, whatever else may be wrong with it; none if it is
    not sharded."""
    groups = [
        group for m in model.modules() for g in _all_param_groups(m) for group in _sharding(g)
    ]
    return list({id(group): group for group in groups}.values())


def find_units(model: nn.Module) -> list[Unit]:
    """The FSDP2 units of a model, in module order, with their trainable parameters.

    Raises:
        ValueError: if it is sharded in a way whose reduce-scatter cannot be replaced, or if a
            unit is already wrapped.
    """
    modules = [(plain_name(name), module) for name, module in model.named_modules()]
    names = {id(module): name for name, module in modules}
    units: list[Unit] = []
    seen: set[int] = set()
    grad_mode = GradMode()
    groups = [group for _, module in modules for group in _all_param_groups(module)]
    dims = (dim for group in groups for p in group.fsdp_params for dim in _parallel(p, group))
    parallel = list({dim.ranks: dim for dim in dims}.values())
    for name, module, is_topmost in _with_topmost(modules):
        for group in _param_groups(name, module):
            if id(group) not in seen:
                seen.add(id(group))
                units.append(_unit(name, module, group, names, grad_mode, is_topmost, parallel))
    return units


def _with_topmost(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Modules by name, parents first, and whether no module above is sharded."""
    above: set[str] = set()
    for name, module in modules:
        parts = name.split(".") if name else []
        inside = any(".".join(parts[:end]) in above for end in range(len(parts)))
        yield name, module, not inside
        if isinstance(module, FSDPModule):
            above.add(name)


def plain_name(name: str) -> str:
    """Without what ``torch.compile`` and activation checkpointing put into names: policies mean
    the model that people wrote."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unused_parameters_remedy() -> str:
    """What to do about parameters that a step may leave without a gradient."""
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return (
            "call set_reduce_scatter_unused_params(True) on the FSDP modules whose parameters a "
            "step may leave unused"
        )
    return (
        "let every parameter take part in every step (this torch has no "
        "set_reduce_scatter_unused_params)"
    )


def _reduced_now() -> Sequence[Any] | None:
    """FSDP's parameters in the reduction that runs, which only the function has that called its
    collective; None if FSDP has no such function any more."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "foreach_reduce":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("fsdp_params")


def _all_param_groups(module: nn.Module) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    # torch 2.13 has a list, 2.11 at most one.
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g is not None] if groups is None else groups


def _param_groups(name: str, module: nn.Module) -> Iterator[Any]:
    groups = _all_param_groups(module)
    if len(groups) > 1:
        raise ValueError(
            f"{name or 'the root module'!r} has {len(groups)} FSDP parameter groups (from "
            "shard_placement_fn with several meshes); torch cannot replace the reduce-scatter of "
            "such a module. Apply fully_shard to its children separately"
        )
    yield from groups


def _unit(
    name: str,
    module: nn.Module,
    group: Any,
    names: dict[int, str],
    grad_mode: GradMode,
    is_topmost: bool,
    parallel: Sequence[ParallelDim],
) -> FSDP2Unit:
    assert isinstance(module, FSDPModule)
    trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    mesh = group.mesh_info
    replicated = hasattr(mesh, "replicate_mesh_size") and hasattr(mesh, "shard_mesh_size")
    if replicated and not all_reduces_by_class():
        raise ValueError(_in_one_dimension(name, mesh))
    if not hasattr(mesh, "shard_mesh_size"):
        raise ValueError(
            f"{name or 'the root module'!r} is replicated, not sharded: there is no "
            "reduce-scatter to compress. Give fully_shard a mesh with a shard dimension"
        )
    if isinstance(group._reduce_scatter_comm, _CustomReduceScatter):
        raise ValueError(
            f"{name or 'the root module'!r} is already wrapped, by itself or as a part of another "
            "model; call tagc.compressor(that_model).remove() first"
        )
    _check_own(name, group._reduce_scatter_comm, "reduce-scatter")
    policy = group.mp_policy
    stored = [p.sharded_param.dtype for p in group.fsdp_params]
    # Frozen parameters may have another dtype; FSDP insists on one for the others.
    reduced = next((p.sharded_param.dtype for p in trainable), stored[0])
    state: Any = module._get_fsdp_state()
    # FSDP decides in the first forward that its root keeps its parameters until backward; a part of
    # a larger model that is wrapped alone before that is taken for one.
    is_root = is_topmost if state._is_root is None else state._is_root
    root = is_root and getattr(state, "_auto_reshard_after_forward", False)
    planned = {id(p): _unit_param(p, group, names, parallel) for p in group.fsdp_params}
    return FSDP2Unit(
        info=UnitInfo(
            name=name,
            params=tuple(planned[id(p)] for p in trainable),
            world_size=mesh.shard_mesh_size,
            dtype=policy.reduce_dtype or policy.param_dtype or reduced,
        ),
        gather_info=UnitInfo(
            name=name,
            params=tuple(planned.values()),
            world_size=mesh.shard_mesh_size,
            # FSDP gathers several dtypes as bytes.
            dtype=policy.param_dtype or (stored[0] if len(set(stored)) == 1 else torch.uint8),
            # Resharded to a smaller group, the backward gathers there, natively.
            per_step=(
                2
                if group._reshard_after_forward and not group._use_post_forward_mesh and not root
                else 1
            ),
        ),
        module=module,
        group=mesh.shard_process_group,
        device=group.device,
        replicas=mesh.replicate_process_group if replicated else None,
        parallel=[dim.group for p in group.fsdp_params for dim in _parallel(p, group)],
        _param_group=group,
        _grad_mode=grad_mode,
        _native=(group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook),
    )


def _in_one_dimension(name: str, info: Any) -> str:
    """What to change where FSDP's own all-reduce over replicas cannot be replaced."""
    mesh = info.mesh
    dims = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    sizes = ", ".join(f"{dim}={size}" for dim, size in zip(dims, mesh.shape, strict=True))
    replicate, shard = dims[info.replicate_mesh_dim], dims[info.shard_mesh_dim]
    return (
        f"{name or 'the root module'!r} is sharded and replicated over a mesh of ({sizes}) (HSDP), "
        "and this torch lets nobody replace its all-reduce. Two lines to change:\n"
        f'    fully_shard(module, mesh=mesh["{shard}"])\n'
        f'    tagc.wrap(model, ..., replicas=mesh["{replicate}"])'
    )


def _is_own(comm: Any) -> bool:
    """Whether FSDP made a collective, and not somebody else."""
    return type(comm).__module__.startswith("torch.")


def _check_own(name: str, comm: Any, kind: str) -> None:
    """Raise where somebody else than FSDP made a collective that tagc would replace."""
    if not _is_own(comm):
        raise ValueError(
            f"{name or 'the root module'!r} has its own {kind}, {type(comm).__name__} (from "
            f"set_custom_{kind.replace('-', '_')}), which tagc would replace; leave it out, or "
            "do not wrap the model"
        )


def _sharding(group: Any) -> list[dist.ProcessGroup]:
    """FSDP's own groups of a parameter group."""
    names = ("shard_process_group", "replicate_process_group")
    found = [getattr(group.mesh_info, name, None) for name in names]
    return [one for one in found if one is not None]


def _parallel(param: Any, group: Any) -> list[ParallelDim]:
    return parallel_dims(param.sharded_param, _sharding(group))


def _unit_param(
    param: Any, group: Any, names: dict[int, str], parallel: Sequence[ParallelDim]
) -> UnitParam:
    dims, shape = _parallel(param, group), tuple(param.sharded_param.shape)
    return UnitParam(
        name=_param_name(param, names),
        shape=shape,
        box=box_of(shape, dims),
        duplicate=duplicate_of(dims, _sharding(group), parallel),
        columns=param.padded_sharded_param_size.numel(),
        dim=param.fsdp_placement.dim,
        local=tuple(param.padded_sharded_param_size),
        frozen=not param.sharded_param.requires_grad,
    )


def _param_name(param: Any, names: dict[int, str]) -> str:
    """Qualified name of an FSDP parameter; a shared one has the name that FSDP knows it by.

    Not by way of ``named_parameters``: between forward and backward the module holds another,
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
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _check_policy(policy: Policy, replicas: bool) -> None:
    """All that a policy can ask for is possible."""


FSDP2 = Integration(
    name="FSDP2",
    spelled="FSDP2 (fully_shard)",
    shards=_shards,
    sharding_groups=sharding_groups,
    find_units=find_units,
    check_policy=_check_policy,
)

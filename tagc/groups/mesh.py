"""Makes the groups that compress: torch's backend ``tagc``, for the dimensions of a device mesh.

Tensor, sequence, context, pipeline and expert parallelism send activations through the group of a
mesh's dimension, and torch lets every dimension have a backend.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as make_mesh
from torch.distributed.tensor import DTensor

from tagc.basics.switch import is_disabled
from tagc.basics.version import __version__
from tagc.collect.agree import complaint_of
from tagc.groups.compressed_group import BACKEND, GROUPS, CompressedGroup
from tagc.plan.unit_plan import MESSAGE_FORMAT
from tagc.policy import Policy, PolicyError
from tagc.policy.rules import DimensionRule


@dataclass(frozen=True)
class DimensionBytes:
    """What the groups of one dimension sent.

    Attributes:
        wire_bytes: bytes that this rank sent.
        dense_bytes: bytes that torch's own collectives would have sent.
    """

    wire_bytes: int
    dense_bytes: int


class DimensionOptions(Backend.Options):
    """What a group of backend ``tagc`` is made with; see :func:`dimension_options`.

    Attributes:
        dimension: the mesh dimension's name, for metrics.
        rule: how it is compressed.
        replaces: whether the group takes the place of another one in the same mesh.
    """

    def __init__(self, dimension: str, rule: DimensionRule, *, replaces: bool = False) -> None:
        super().__init__(BACKEND, default_pg_timeout)
        self.dimension, self.rule, self.replaces = dimension, rule, replaces


def live_groups() -> Collection[CompressedGroup]:
    """This process's groups of backend ``tagc`` that were not destroyed."""
    return GROUPS & dist.distributed_c10d._world.pg_map.keys()


def bytes_by_dimension() -> dict[str, DimensionBytes]:
    """What this process's groups of backend ``tagc`` sent so far, by dimension."""
    total: dict[str, DimensionBytes] = {}
    for group in live_groups():
        wire, dense = astuple(total.get(group.dimension, DimensionBytes(0, 0)))
        total[group.dimension] = DimensionBytes(wire + group.wire_bytes, dense + group.dense_bytes)
    return dict(sorted(total.items()))


def _register_backends(given: Any, groups: Sequence[dist.ProcessGroup]) -> None:
    """Serve groups of the same ranks by new backends, of the kinds that the default group has."""
    config: Any = dist.get_backend_config()
    kinds = dist.BackendConfig(config).get_device_backend_map()
    made: dict[str, Any] = {}
    for device, name in kinds.items():
        if name not in ("gloo", "nccl"):
            raise ValueError(
                f"backend {BACKEND!r} sends its messages by gloo or nccl, but the default group "
                f"has {name!r} for device {device!r}"
            )
        if name not in made:
            made[name] = _backend(name, given)
        kind = getattr(dist.ProcessGroup.BackendType, name.upper())
        for group in groups:
            group._set_default_backend(kind)
            group._register_backend(torch.device(device), kind, made[name])


def _backend(kind: str, given: Any) -> Any:
    place = given.store, given.group_rank, given.group_size
    if kind == "gloo":
        backend = dist.ProcessGroupGloo(*place, timeout=given.timeout)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = given.timeout
        options.global_ranks_in_group = given.global_ranks_in_group
        options.group_name = given.group_id
        backend = dist.ProcessGroupNCCL(*place, options)
    backend._set_sequence_number_for_group()
    return backend


def _create(given: Any, options: Any) -> CompressedGroup:
    """Make a group, for torch: what ``register_backend`` calls for every new one. ``given`` is
    torch's ``_DistributedBackendOptions``: the store, the ranks, the timeout."""
    if not dist.is_initialized():
        raise ValueError(
            f"backend {BACKEND!r} is for the groups of a mesh's dimensions. Call "
            "init_process_group with gloo or nccl first"
        )
    if not isinstance(options, DimensionOptions):
        raise ValueError(
            f"backend {BACKEND!r} needs to know how to compress: give "
            "tagc.dimension_options(policy, dimension) as pg_options, or in backend_override"
        )
    if not options.replaces:
        _refuse_twin(given, options)
    _agree(given, f"dimension {options.dimension!r} with {options.rule.codec!r}")
    inner = dist.ProcessGroup(given.store, given.group_rank, given.group_size)
    group = CompressedGroup(inner, options.dimension, options.rule)
    _register_backends(given, [inner, group])
    return group


def _refuse_twin(given: Any, options: DimensionOptions) -> None:
    """Refuse a dimension of a mesh that torch would take for another one. Meshes with the same
    ranks and names are equal for DTensor, whatever their groups are, and share its caches, so the
    second mesh's tensors could travel through the first one's groups."""
    world = dist.distributed_c10d._world
    for group, ranks in world.pg_group_ranks.items():
        alike = isinstance(group, CompressedGroup) and group.rule == options.rule
        if not isinstance(group, dist.ProcessGroup) or alike:
            continue  # a number stands for a group that this rank is not in
        same = group.group_desc == f"mesh_{options.dimension}"
        if same and list(ranks) == list(given.global_ranks_in_group):
            raise ValueError(
                f"there is a mesh with a dimension {options.dimension!r} of the same ranks, whose "
                "groups compress otherwise or not at all. torch cannot tell such meshes apart: "
                "make one mesh only, or give the dimensions different names"
            )


def _agree(given: Any, rule: str) -> None:
    """Refuse ranks that would code differently, before any of them sends."""
    off = ", disabled" if is_disabled() else ""
    ours = f"tagc {__version__}, messages in format {MESSAGE_FORMAT}, {rule}{off}"
    given.store.set(f"tagc/{given.group_rank}", ours)
    answers = {
        rank: {"compression": given.store.get(f"tagc/{rank}").decode()}
        for rank in range(given.group_size)
    }
    remedy = "Give all ranks of a group the same policy"
    complaint = complaint_of(["compression"], answers, "making a group", remedy)
    if complaint is not None:
        raise RuntimeError(complaint)


def dimension_options(
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy, dimension: str
) -> DimensionOptions:
    """What a group of backend ``tagc`` needs to compress as a policy says for a mesh dimension.

    For programs that make groups and meshes themselves::

        options = tagc.dimension_options("hybrid-3d", "tp")
        mesh = init_device_mesh(..., backend_override={"tp": ("tagc", options)})
        group = dist.new_group(ranks, backend="tagc", pg_options=options)

    Raises:
        tagc.PolicyError: if the policy is not valid, or has no rule for the dimension.
    """
    loaded = Policy.load(policy)
    rule = loaded.dimensions.get(dimension)
    if rule is None:
        known = ", ".join(loaded.dimensions) or "none"
        raise PolicyError(
            f"policy {loaded.name!r} has no rule for dimension {dimension!r} (it has: {known}); "
            "leave the group to torch, or add it under 'dimensions'"
        )
    return DimensionOptions(dimension, rule)


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...],
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy,
) -> DeviceMesh:
    """``torch.distributed.init_device_mesh`` with groups that compress as a policy says.

    A dimension that the policy names under ``dimensions`` gets groups of backend ``tagc``. All
    others get torch's own, among them those of data parallelism: :func:`tagc.wrap` compresses
    gradients and parameters. Call it on all ranks with the same arguments.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh_shape: ranks by dimension.
        mesh_dim_names: their names; those in the policy compress.
        policy: as for :func:`tagc.wrap`.

    Raises:
        tagc.PolicyError: if the policy is not valid, or names none of the dimensions.
        RuntimeError: if the ranks of a group have different policies.
    """
    loaded = Policy.load(policy)
    named = [name for name in mesh_dim_names if name in loaded.dimensions]
    if not named:
        known = ", ".join(loaded.dimensions) or "none"
        raise PolicyError(
            f"policy {loaded.name!r} has rules for dimensions: {known}; the mesh has "
            f"{', '.join(mesh_dim_names)}. Rename the mesh's dimensions, or use torch's "
            "init_device_mesh, and tagc.wrap for data parallelism"
        )
    override: dict[Any, Any] = {name: (BACKEND, dimension_options(loaded, name)) for name in named}
    return make_mesh(
        device_type, mesh_shape, mesh_dim_names=mesh_dim_names, backend_override=override
    )


def compress_meshes(meshes: Iterable[DeviceMesh], policy: Policy) -> None:
    """Give meshes that a program made groups that compress, in the dimensions of the policy.

    For programs that neither take a mesh nor options for its groups. Call it before anything uses
    the meshes or takes parts of them, on all ranks with the same meshes in the same order.

    Args:
        meshes: all meshes of the program, also parts of others.
    """
    made: dict[str, str] = {}
    for mesh in meshes:
        names: Any = mesh._dim_group_names
        for i, dimension in enumerate(mesh.mesh_dim_names or ()):
            rule = policy.dimensions.get(dimension)
            if rule is None or mesh.size(i) == 1 or names[i] in made.values():
                continue
            if names[i] not in made:
                group: Any = dist.new_group(
                    dist.get_process_group_ranks(mesh.get_group(i)),
                    backend=BACKEND,
                    pg_options=DimensionOptions(dimension, rule, replaces=True),
                    # Only the group's ranks meet: in other groups, other dimensions come next.
                    use_local_synchronization=True,
                    group_desc=f"mesh_{dimension}",
                )
                made[names[i]] = group.group_name
            names[i] = made[names[i]]


def check_meshes(model: nn.Module, policy: Policy) -> None:
    """Refuse a model on a mesh that was made with another policy."""
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    for mesh in meshes:
        for name in mesh.mesh_dim_names or ():
            group, rule = mesh.get_group(name), policy.dimensions.get(name)
            made_with = group.rule if isinstance(group, CompressedGroup) else None
            if made_with != rule:
                wanted, found = (one.codec if one else "nothing" for one in (rule, made_with))
                raise PolicyError(
                    f"policy {policy.name!r} says {wanted} for dimension {name!r} of the model's "
                    f"mesh, but its groups were made with {found}: make the mesh by "
                    "tagc.init_device_mesh(..., policy=...) with the policy that you give tagc.wrap"
                )


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])

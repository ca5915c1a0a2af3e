"""FSDP1: the one file that knows ``FullyShardedDataParallel``'s internals.

Its communication hook replaces the reduce-scatter. FSDP1 registers one hook with one state for all
instances of a model, and each instance keeps both as attributes. So tagc gives every instance its
own state after it has registered the hook. The all-gather cannot be replaced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name

from tagc.attach.unit import Integration, Unit, already_wrapped
from tagc.collect import CollectiveWork, Transport, UnitReducer
from tagc.plan import FlatBuffer, UnitInfo, UnitParam
from tagc.policy import Policy, PolicyError


@dataclass(frozen=True, kw_only=True)
class FSDP1Unit(Unit):
    """One ``FullyShardedDataParallel`` instance that holds parameters itself."""

    _module: Any
    _root: Any

    def install(self, reducer: UnitReducer) -> None:
        if self._root._comm_hook is None:
            self._root.register_comm_hook(None, _hook)
        self._module._comm_hook_state = (self, reducer)

    def trainable(self) -> list[nn.Parameter]:
        """The flat parameter, or with ``use_orig_params`` the model's: :meth:`Unit.trainable`."""
        flat = self._module._handle.flat_param
        return [flat] if flat._params is None else [p for p in flat._params if p.requires_grad]

    def restore(self) -> None:
        if self._root._comm_hook is not _hook:
            return
        for module in FullyShardedDataParallel.fsdp_modules(self._root):
            module._comm_hook = module._comm_hook_state = None

    def average_natively(
        self, out: Tensor, inp: Tensor, transport: Transport, op: dist.ReduceOp.RedOpType
    ) -> CollectiveWork:
        """Average as FSDP1 does: divide by one factor before the sum and by the rest after it."""
        if self._module._gradient_predivide_factor > 1:
            inp.div_(self._module._gradient_predivide_factor)
        pending = transport.reduce_scatter(out, inp, dist.ReduceOp.SUM)
        pending.wait()
        if self._module._gradient_postdivide_factor > 1:
            out.div_(self._module._gradient_postdivide_factor)
        return pending


def _hook(
    state: tuple[FSDP1Unit, UnitReducer] | None, grad: Tensor, shard: Tensor | None = None
) -> None:
    """FSDP1's communication hook: ``grad`` ``[W * S]`` to ``shard`` ``[S]``."""
    # In a group of one rank FSDP does not shard, and the gradient already is the average.
    if shard is not None:
        assert state is not None
        unit, reducer = state
        # FSDP does not divide if there is a hook.
        reducer.reduce(shard, grad, unit.group, dist.ReduceOp.AVG, unit.average_natively)


def _modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]


def find_units(model: nn.Module) -> list[Unit]:
    """The FSDP1 units of a model, in module order, with their trainable parameters."""
    units: list[Unit] = []
    roots: dict[str, FullyShardedDataParallel] = {}
    for name, module in _modules(model):
        outer = (r for r in roots if not r or name.startswith(f"{r}."))
        root = roots.setdefault(next(outer, name), module)
        _check(repr(_clean(name)) if _clean(name) else "the root module", module, module is root)
        if module._handle is not None:
            units.append(_unit(name, module, root))
    return units


def check_policy(policy: Policy, replicas: bool) -> None:
    """Refuse rules for parameters and replicas, and averaging over replicas (``replicas``)."""
    if policy.parameters:
        raise PolicyError(
            f"policy {policy.name!r} has rules for parameters, but the model uses FSDP1 "
            "(FullyShardedDataParallel), whose all-gather cannot be replaced; use a policy for "
            "gradients only, such as 'loco-4bit' (MixedPrecision(param_dtype=torch.bfloat16) "
            "halves the all-gather), or shard the model with fully_shard"
        )
    if policy.replicas or replicas:
        raise PolicyError(
            "tagc averages over replicas for FSDP2 only: the model uses FSDP1 "
            "(FullyShardedDataParallel), in which ranks hold different parts of a parameter list; "
            'shard it with fully_shard over mesh["shard"] to use replicas=mesh["replicate"]'
        )


def _check(name: str, module: Any, is_root: bool) -> None:
    if module._comm_hook is _hook:
        raise already_wrapped(name)
    if module._comm_hook is not None:
        hook = getattr(module._comm_hook, "__name__", repr(module._comm_hook))
        raise ValueError(
            f"{name} has its own communication hook ({hook}, by register_comm_hook). "
            "FSDP1 has one hook per model, and tagc needs it: remove yours"
        )
    strategy = module.sharding_strategy
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        raise ValueError(
            f"{name} is sharded and replicated ({strategy.name}), for which FSDP1 has no "
            "communication hook; use FULL_SHARD or SHARD_GRAD_OP, or torch.distributed.fsdp."
            'fully_shard over mesh["shard"] and tagc.wrap(..., replicas=mesh["replicate"])'
        )
    if strategy is ShardingStrategy.NO_SHARD and module.process_group.size() > 1:
        raise ValueError(
            f"{name} is replicated, not sharded (NO_SHARD): there is no reduce-scatter to "
            "compress. Use FULL_SHARD or SHARD_GRAD_OP, or torch.distributed.fsdp.fully_shard"
        )
    if is_root and module._is_root is False:
        raise ValueError(
            f"{name} is part of a larger FSDP1 model, which has only one hook; call tagc.wrap with "
            "the whole model"
        )


def _unit(name: str, module: Any, root: FullyShardedDataParallel) -> FSDP1Unit:
    handle = module._handle
    flat = handle.flat_param
    params: list[UnitParam] = []
    columns = flat._sharded_size.numel()
    spans = zip(_starts(flat), flat._fqns, flat._shapes, strict=True)
    for i, (start, fqn, shape) in enumerate(spans):
        param = flat if flat._params is None else flat._params[i]
        # FSDP1 also reduces the gradients of frozen parameters, and then drops them.
        if param.requires_grad:
            # The most elements of it that one shard has.
            numel, first = math.prod(shape), columns - start % columns
            most = max(min(numel, first), min(columns, numel - min(numel, first)))
            name_of = _clean(f"{name}.{fqn}")
            params.append(UnitParam(name=name_of, shape=tuple(shape), columns=most, start=start))
    specified = handle._low_prec_reduce_dtype_specified or handle._low_prec_param_dtype_specified
    return FSDP1Unit(
        info=UnitInfo(
            name=_clean(name),
            params=tuple(params),
            world_size=module.process_group.size(),
            # Before its first forward, FSDP follows changes of the parameters' dtype.
            dtype=handle._reduce_dtype if specified else flat.dtype,
            flat=FlatBuffer(columns=columns, whole=len(params) == len(flat._fqns)),
        ),
        group=module.process_group,
        device=module.compute_device,
        _module=module,
        _root=root,
    )


def _starts(flat: Any) -> Sequence[int]:
    """First element of every parameter in the flat parameter, which has padding between them."""
    ends = itertools.accumulate(flat._numels_with_padding)
    spans = zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
    return [end - numel for end, numel, is_padding in spans if not is_padding]


def _clean(name: str) -> str:
    """A name without the parts that FSDP1 and activation checkpointing insert."""
    return clean_tensor_name(f"{name}.").removesuffix(".").removeprefix(".")


FSDP1 = Integration(
    name="FSDP1",
    description="FSDP1 (FullyShardedDataParallel)",
    shards=lambda model: bool(_modules(model)),
    sharding_groups=lambda model: [module.process_group for _, module in _modules(model)],
    find_units=find_units,
    check_policy=check_policy,
)

"""Ways to share a model: FSDP2, with replicas, on hosts of two ranks, `replicate`, FSDP1, DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.tensor import DTensor

import tagc
from tagc.attach import ddp
from tagc.plan import UnitPlan

from .fsdp2_options import FSDP2, HOSTS, REPLICAS, REPLICATED
from .model import Net
from .module_options import DDP, DDP_HOSTS, FSDP1
from .option import DTYPES, Dtype, Option, some, two_by_two


@dataclass(frozen=True, kw_only=True)
class Api:
    """A way to shard.

    Attributes:
        options: by name.
        built: shards a model.
        native: shards it for native FSDP, if that is another way.
        wraps: options of `tagc.wrap`.
        gradients: the gradient shard ``[S]`` of every unit of a plan, in float64, in FSDP's
            columns.
        ranks: numbers of ranks that the plain option runs on, and dtypes in turn.
        dtypes: those that make a difference.
        replicas: copies of the sharded model, among 4 ranks.
        same_bits: whether policy `dense` must have native FSDP's bits: not where sums are made in
            another order.
        averages: whether tagc always averages, whatever native FSDP divides by and when.
        refuses: words of the error that a policy must raise, by its name. (With the plain option,
            in fp32; others add nothing.)
    """

    options: Mapping[str, Option]
    built: Callable[[Option, Dtype], Any]
    native: Callable[[Option, Dtype], Any] | None = None
    wraps: Callable[[], dict[str, Any]] = dict
    gradients: Callable[[Any, Sequence[UnitPlan]], list[Tensor]]
    ranks: Sequence[int] = (2, 3, 4, 5)
    dtypes: Sequence[str] = tuple(DTYPES)
    replicas: int = 1
    same_bits: bool = True
    averages: bool = False
    refuses: Mapping[str, str] = field(default_factory=dict)

    def wrapped(self, option: Option, dtype: Dtype, policy: dict[str, Any] | None) -> Any:
        """A model that is sharded and wrapped with a rule, or with policy `dense`."""
        if policy is not None and option.names != "*":
            policy = policy | {"when": {"name": option.names}}
        return wrap(self.built(option, dtype), policy, **self.wraps())


def built(option: Option, dtype: Dtype, **where: Any) -> Any:
    torch.manual_seed(1)
    model = Net(**option.net).to(dtype.model)
    option.prepare(model)
    # FSDP1 and DDP return another module.
    model = option.shard(model, **where) or model
    option.configure(model)
    return model


def fsdp2_built(option: Option, dtype: Dtype, **where: Any) -> Any:
    return built(option, dtype, mp_policy=dtype.mixed, **where)


def fsdp1_built(option: Option, dtype: Dtype) -> Any:
    mixed = MixedPrecision(param_dtype=dtype.param, reduce_dtype=dtype.reduce)
    return built(option, dtype, mixed_precision=mixed, device_id=torch.device("cpu"))


def wrap(model: Any, policy: dict[str, Any] | None, **where: Any) -> Any:
    spec: Any = "dense"
    if policy is not None:
        policy, about_parameters = dict(policy), policy.get("parameters")
        policy.pop("parameters", None)
        spec = {"schema": 1, "gradients": [policy]}
        if about_parameters is not None:
            spec["parameters"] = [about_parameters]
        if "replicas" in where:
            # No copy of a shard is its owner, to choose for the others.
            own = {key: value for key, value in policy["codec"].items() if key != "support"}
            spec["replicas"] = [policy | {"codec": own}]
    # With DDP, several units.
    with patch.object(ddp, "UNIT_BYTES", 3000), warnings.catch_warnings():
        # Units as small as these may well cost more compressed.
        warnings.simplefilter("ignore")
        return tagc.wrap(model, spec, **where)


def gradients(model: Any, units: Sequence[UnitPlan], *, whole: bool = False) -> list[Tensor]:
    """This rank's shards, or whole gradients, row by row on hosts."""
    params: dict[str, Any] = {plain(name): p for name, p in model.named_parameters()}
    found = []
    for unit in units:
        rows = torch.zeros(unit.rows if whole else 1, unit.columns, dtype=torch.float64)
        at = 0
        for param in (p for segment in unit.segments for p in segment.params):
            grad = params[param.name].grad
            if grad is not None:
                grad = grad.to_local() if isinstance(grad, DTensor) else grad
                cut = torch.zeros(len(rows) * param.columns, dtype=torch.float64)
                cut[: grad.numel()] = grad.flatten()
                rows[:, at : at + param.columns] = cut.view(len(rows), -1)
            at += param.columns
        found.append(rows.flatten())
    return found


whole_gradients = partial(gradients, whole=True)


def fsdp1_gradients(model: Any, units: Sequence[UnitPlan]) -> list[Tensor]:
    """Where FSDP1 itself says that its flat parameters have them."""
    found = []
    modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    handles = [module._handle for module in modules if module._handle is not None]
    for handle, unit in zip(handles, units, strict=True):
        flat = handle.flat_param
        columns = torch.zeros(unit.buffer_columns, dtype=torch.float64)
        if flat._params is None:
            if flat.grad is not None:
                columns += flat.grad
        else:
            for param, info in zip(flat._params, flat._shard_param_infos, strict=True):
                if info.in_shard and param.grad is not None:
                    start = info.offset_in_shard
                    columns[start : start + info.numel_in_shard] = param.grad.flatten()
        found.append(columns)
    return found


def plain(name: str) -> str:
    for part in ("_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(part, "")
    return name


def on_hosts() -> dict[str, Any]:
    return {"hosts": 2}


APIS: dict[str, Api] = {
    "FSDP2": Api(options=FSDP2, built=fsdp2_built, gradients=gradients),
    "FSDP2, replicas": Api(
        options=REPLICAS,
        built=lambda option, dtype: fsdp2_built(option, dtype, mesh=two_by_two()["shard"]),
        native=lambda option, dtype: fsdp2_built(option, dtype, mesh=two_by_two()),
        wraps=lambda: {"replicas": two_by_two()["replicate"]},
        gradients=gradients,
        ranks=(4,),
        replicas=2,
    ),
    "FSDP2, hosts": Api(
        options=HOSTS,
        built=fsdp2_built,
        wraps=on_hosts,
        gradients=gradients,
        ranks=(4,),
        same_bits=False,
    ),
    "replicate": Api(
        options=REPLICATED,
        built=fsdp2_built,
        gradients=whole_gradients,
        # Without rules for parameters, whose dtypes matter in FSDP2.
        dtypes=[name for name, dtype in DTYPES.items() if not dtype.refused_changes],
    ),
    "replicate, hosts": Api(
        options=some(
            REPLICATED,
            "plain; gradient_sync off; force_sum_reduction; tied weights",
            ranks=(4,),
        ),
        built=fsdp2_built,
        wraps=on_hosts,
        gradients=whole_gradients,
        ranks=(4,),
        dtypes=("fp32", "bf16"),
        same_bits=False,
    ),
    "FSDP1": Api(
        options=FSDP1,
        built=fsdp1_built,
        gradients=fsdp1_gradients,
        averages=True,
        refuses={
            "matrix": "sharded by FSDP1, which cuts through rows",
            "changes": "has rules for parameters, but the model uses FSDP1",
        },
    ),
    "DDP": Api(
        options=DDP,
        built=built,
        gradients=whole_gradients,
        dtypes=("fp32", "model in bf16", "model in fp64"),
        # Without a hook DDP multiplies by 1 / W instead of dividing by W, and gloo's ring adds up
        # a bucket of its own in another order.
        same_bits=False,
        averages=True,
    ),
    "DDP, hosts": Api(
        options=DDP_HOSTS,
        built=built,
        wraps=on_hosts,
        gradients=whole_gradients,
        ranks=(4,),
        dtypes=("fp32", "model in bf16"),
        same_bits=False,
        averages=True,
    ),
}

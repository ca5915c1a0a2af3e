"""The parity matrix: native FSDP beside tagc, by API, dtype, ranks, option and policy.

    python tests/parity.py            # run all of it and print the tables of docs/parity.md
    python tests/parity.py --quick    # what `make test` runs

A case passes if, over several backwards with data of each rank and step,

- `dense`: the gradients of every step have the bits of native FSDP's;
- every other policy: the sum of the gradients that tagc handed out and of all residuals is the sum
  of the native gradients, within the rounding of the sums (`bound`);
- `int32x1` at density 1, besides: what all ranks together still owe an element is at most half a
  quantization step of each.

Another API is another `Api` in `APIS`: how to shard a model for it, and where its gradients are.
"""

from __future__ import annotations

import argparse
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import tagc
from tagc.codec_plans import MatrixPlan
from tagc.pieces import pieces
from tagc.plan import Segment, UnitPlan
from tagc.reducer import UnitReducer

STEPS = 2

# The model


class Block(nn.Module):
    """11 rows divide by no number of ranks, 60 columns by all."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(11)
        self.up = nn.Linear(11, 60)
        self.down = nn.Linear(60, 11)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        inner = partial(checkpoint, self.inner, use_reentrant=False)
        return inner(x) if self.recompute else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(
        self, *, recompute: bool = False, tied: bool = False, extra: bool = False, times: int = 1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 11)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.extra = nn.Linear(11, 11) if extra else None
        self.head = nn.Linear(11, 13, bias=False)
        self.times = times
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, take_extra: bool = False) -> Tensor:
        x = self.embed(tokens)
        for block in list(self.blocks) * self.times:
            x = block(x)
        if take_extra and self.extra is not None:
            x = self.extra(x)
        return self.head(x)


def loss_of(model: nn.Module, rank: int, step: int, **how: Any) -> Tensor:
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(97 * step + rank))
    logits = model(tokens, **how)
    # The scale differs between steps, or residuals would not.
    return (1 + step) * nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


# Options: how people use FSDP


def once(model: Any, rank: int, step: int, **how: Any) -> None:
    loss_of(model, rank, step, **how).backward()


def nothing(model: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to use FSDP.

    Attributes:
        net: arguments of :class:`Net`.
        prepare: changes the model before it is sharded.
        shard: shards it, for this API; returns what FSDP1 makes of it.
        configure: calls FSDP's setters.
        backward: one step's backwards.
        after: what follows them, before the optimizer.
        sums: whether FSDP reduces with SUM, not AVG.
        divides: by what FSDP divides after that, given the ranks.
        ranks: numbers of ranks that make sense.
        names: parameters that a policy compresses, for FSDP1, which lays out all others apart.
        refused: words of the error that a policy which compresses must raise.
        refused_dense: words of the error that policy `dense` must raise, or native FSDP.
    """

    net: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = nothing
    shard: Callable[..., Any]
    configure: Callable[[Any], None] = nothing
    backward: Callable[..., None] = once
    after: Callable[[Any], None] = nothing
    sums: bool = False
    divides: Callable[[int], float] = lambda ranks: 1
    ranks: Sequence[int] = (2, 3, 2, 3, 4, 2, 3, 5)
    names: str = "*"
    refused: str = ""
    refused_dense: str = ""


def by_block(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def in_one_unit(model: Any, **options: Any) -> None:
    fully_shard(model, **options)


def blocks_together(model: Any, **options: Any) -> None:
    fully_shard(list(model.blocks), **options)
    fully_shard(model, **options)


def by_columns(model: Any, **options: Any) -> None:
    def place(p: Tensor) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] == 60 else None

    by_block(model, shard_placement_fn=place, **options)


def in_two_meshes(model: Any, **options: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )

    world = init_device_mesh("cpu", (dist.get_world_size(),))
    pairs = two_by_two()["shard"]

    one, other = (FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (pairs, world))

    def place(p: Tensor) -> Any:
        return ShardPlacementResult(Shard(0), one if p.ndim == 1 else other)

    fully_shard(model, mesh=world, shard_placement_fn=place, **options)


def in_hybrid_mesh(model: Any, **options: Any) -> None:
    by_block(model, mesh=two_by_two(), **options)


def in_data_mesh(model: Any, **options: Any) -> None:
    by_block(model, mesh=two_by_two()["replicate"], **options)


def split_blocks(model: Any) -> None:
    """Tensor parallelism in pairs of ranks, which FSDP then shards across."""
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, two_by_two()["shard"], plan)


def wrap_blocks(model: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def compile_blocks(model: Any, backend: str = "aot_eager") -> None:
    import torch._dynamo  # takes a second

    torch._dynamo.reset()  # it compiles the same code for a few models only
    # Its own: it looks whether an activation has a gradient.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    for block in model.blocks:
        block.compile(backend=backend)


def freeze_some(model: Any) -> None:
    model.embed.requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)


def freeze_a_unit(model: Any) -> None:
    model.blocks[0].requires_grad_(False)


def each(call: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A setter that is not recursive, on every FSDP module."""

    def configure(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                call(module)

    return configure


def both(*calls: Callable[[Any], None]) -> Callable[[Any], None]:
    def configure(model: Any) -> None:
        for call in calls:
            call(model)

    return configure


SUMS = each(lambda module: module.set_force_sum_reduction_for_comms(True))


def factor(value: float) -> Callable[[Any], None]:
    return each(lambda module: module.set_gradient_divide_factor(value))


def factor_of_the_ranks(model: Any) -> None:
    factor(float(dist.get_world_size()))(model)


def explicit_prefetch(model: Any) -> None:
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def unsynced(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, rank, 3 * step + micro).backward()


def synced(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        loss_of(model, rank, 3 * step + micro).backward()


def alike_in_pairs(model: Any, rank: int, step: int) -> None:
    once(model, rank // 2, step)


def last_flagged(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        model.set_is_last_backward(micro == 2)
        model.set_requires_gradient_sync(micro == 2)
        model.set_reshard_after_backward(micro == 2)
        loss_of(model, rank, 3 * step + micro).backward()


def unsharded_between(model: Any, rank: int, step: int) -> None:
    model.set_reshard_after_backward(False)
    synced(model, rank, step)
    each(lambda module: module.reshard())(model)


def not_replicated(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        loss_of(model, rank, 3 * step + micro).backward()


def on_even_ranks(model: Any, rank: int, step: int) -> None:
    once(model, rank, step, take_extra=rank % 2 == 0)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unused_reduced(model: Any) -> None:
    model.set_reduce_scatter_unused_params(True)


FSDP2: dict[str, Option] = {
    "plain": Option(shard=by_block),
    "one unit": Option(shard=in_one_unit),
    "force_sum_reduction": Option(
        shard=by_block, configure=SUMS, sums=True, divides=lambda ranks: ranks
    ),
    "divide factor of the ranks": Option(shard=by_block, configure=factor_of_the_ranks),
    "divide factor 3, force_sum": Option(
        shard=by_block, configure=both(factor(3.0), SUMS), sums=True, divides=lambda ranks: 3
    ),
    "divide factor 7": Option(
        shard=by_block,
        configure=factor(7.0),
        refused="only SUM and AVG can be compressed; with a gradient divide factor, also call "
        "set_force_sum_reduction_for_comms(True)",
        refused_dense="Cannot use ReduceOp.PREMUL_SUM with Gloo",
    ),
    "gradient_sync off": Option(shard=by_block, backward=unsynced),
    "accumulation with sync": Option(shard=by_block, backward=synced),
    "is_last_backward": Option(shard=by_block, backward=last_flagged),
    "clip_grad_norm_": Option(shard=by_block, after=clip),
    "reshard_after_forward=False": Option(shard=partial(by_block, reshard_after_forward=False)),
    "reshard_after_forward=True": Option(shard=partial(by_block, reshard_after_forward=True)),
    "reshard_after_forward=2": Option(shard=partial(by_block, reshard_after_forward=2), ranks=(4,)),
    "reshard_after_backward=False": Option(shard=by_block, backward=unsharded_between),
    "some parameters frozen": Option(prepare=freeze_some, shard=by_block),
    "a unit frozen": Option(prepare=freeze_a_unit, shard=by_block),
    "unused parameters": Option(
        net={"extra": True},
        shard=by_block,
        refused="set_reduce_scatter_unused_params(True)",
    ),
    "reduce_scatter_unused_params": Option(
        net={"extra": True}, shard=by_block, configure=unused_reduced
    ),
    "unused on odd ranks": Option(
        net={"extra": True}, shard=by_block, configure=unused_reduced, backward=on_even_ranks
    ),
    "tied weights": Option(net={"tied": True}, shard=by_block),
    "checkpoint inside": Option(net={"recompute": True}, shard=by_block),
    "checkpoint_wrapper": Option(prepare=wrap_blocks, shard=by_block),
    "compiled blocks": Option(prepare=compile_blocks, shard=by_block, ranks=(2, 3)),
    "CPU offload": Option(
        shard=partial(by_block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "max_input_buffers=3": Option(
        shard=by_block, configure=lambda model: model.set_reduce_scatter_max_input_buffers(3)
    ),
    "separate reduce-scatter group": Option(
        shard=by_block, configure=lambda model: model.set_separate_reduce_scatter_group()
    ),
    "sharded by columns": Option(shard=by_columns),
    "blocks in one group": Option(shard=blocks_together),
    "explicit prefetch": Option(shard=by_block, configure=explicit_prefetch),
    "units called twice": Option(net={"times": 2}, shard=by_block),
    "several parameter groups": Option(
        shard=in_two_meshes,
        ranks=(4,),
        refused="has 2 FSDP parameter groups",
        refused_dense="has 2 FSDP parameter groups",
    ),
    "hybrid mesh": Option(
        shard=in_hybrid_mesh,
        ranks=(4,),
        refused="HSDP",
        refused_dense="HSDP",
    ),
    "tensor parallel blocks": Option(
        prepare=split_blocks, shard=in_data_mesh, backward=alike_in_pairs, ranks=(4,)
    ),
}

REPLICAS: dict[str, Option] = {
    "plain": Option(shard=by_block),
    "force_sum_reduction": Option(
        shard=by_block, configure=SUMS, sums=True, divides=lambda ranks: ranks
    ),
    "gradient_sync off": Option(shard=by_block, backward=unsynced),
    "accumulation with sync": Option(shard=by_block, backward=synced),
    "requires_all_reduce off": Option(shard=by_block, backward=not_replicated),
    "requires_all_reduce off, sums": Option(
        shard=by_block,
        configure=SUMS,
        backward=not_replicated,
        sums=True,
        divides=lambda ranks: ranks,
    ),
    "clip_grad_norm_": Option(shard=by_block, after=clip),
    "some parameters frozen": Option(prepare=freeze_some, shard=by_block),
    "tied weights": Option(net={"tied": True}, shard=by_block),
    "reshard_after_forward=False": Option(shard=partial(by_block, reshard_after_forward=False)),
    "CPU offload": Option(
        shard=partial(by_block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
}

# FSDP1's options


def nested(model: Any, **options: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def hybrid(model: Any, **options: Any) -> Any:
    strategy = ShardingStrategy.HYBRID_SHARD
    return nested(model, device_mesh=two_by_two(), sharding_strategy=strategy, **options)


def not_sharded(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD", category=FutureWarning)
        return nested(model, sharding_strategy=ShardingStrategy.NO_SHARD, **options)


def own_hook(state: Any, grad: Tensor, shard: Tensor) -> None: ...


def in_no_sync(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        with nullcontext() if micro == 2 else model.no_sync():
            loss_of(model, rank, 3 * step + micro).backward()


def clip_shards(model: Any) -> None:
    model.clip_grad_norm_(0.1)


ORIGINAL = partial(nested, use_orig_params=True)
GRAD_OP = partial(nested, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

FSDP1: dict[str, Option] = {
    "plain": Option(shard=nested),
    "use_orig_params": Option(shard=ORIGINAL, ranks=(3,)),
    "weights compressed": Option(shard=nested, names="*weight", ranks=(3,)),
    "weights compressed, use_orig_params": Option(shard=ORIGINAL, names="*weight", ranks=(4,)),
    "SHARD_GRAD_OP": Option(shard=GRAD_OP, ranks=(2,)),
    "SHARD_GRAD_OP, use_orig_params": Option(
        shard=partial(GRAD_OP, use_orig_params=True), ranks=(5,)
    ),
    "one unit": Option(shard=FullyShardedDataParallel),
    "one unit, use_orig_params": Option(
        shard=partial(FullyShardedDataParallel, use_orig_params=True), ranks=(4,)
    ),
    "no_sync": Option(shard=nested, backward=in_no_sync),
    "no_sync, use_orig_params": Option(shard=ORIGINAL, backward=in_no_sync),
    "accumulation with sync": Option(shard=nested, backward=synced),
    "accumulation with sync, use_orig_params": Option(shard=ORIGINAL, backward=synced),
    "clip_grad_norm_": Option(shard=nested, after=clip_shards),
    "clip_grad_norm_, use_orig_params": Option(shard=ORIGINAL, after=clip_shards),
    "some parameters frozen": Option(prepare=freeze_some, shard=ORIGINAL),
    "a unit frozen": Option(prepare=freeze_a_unit, shard=nested),
    "unused on odd ranks": Option(net={"extra": True}, shard=nested, backward=on_even_ranks),
    "tied weights": Option(net={"tied": True}, shard=nested),
    "checkpoint inside": Option(net={"recompute": True}, shard=nested),
    "checkpoint_wrapper": Option(prepare=wrap_blocks, shard=nested),
    "units called twice": Option(net={"times": 2}, shard=nested),
    "HYBRID_SHARD": Option(
        shard=hybrid,
        ranks=(4,),
        refused="sharded and replicated (HYBRID_SHARD)",
        refused_dense="sharded and replicated (HYBRID_SHARD)",
    ),
    "NO_SHARD": Option(
        shard=not_sharded,
        refused="replicated, not sharded (NO_SHARD)",
        refused_dense="replicated, not sharded (NO_SHARD)",
    ),
    "a communication hook": Option(
        shard=nested,
        configure=lambda model: model.register_comm_hook(None, own_hook),
        refused="has a communication hook of its own (own_hook",
        refused_dense="has a communication hook of its own (own_hook",
    ),
}

# Dtypes


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """Of the model, and a mixed precision policy."""

    model: torch.dtype = torch.float32
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    refused: str = ""

    @property
    def mixed(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param, reduce_dtype=self.reduce)

    @property
    def reduced(self) -> torch.dtype:
        return self.reduce or self.param or self.model


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES: dict[str, Dtype] = {
    "fp32": Dtype(),
    "bf16": Dtype(param=BF16, reduce=BF16),
    "bf16, reduced in fp32": Dtype(param=BF16, reduce=F32),
    "reduced in bf16": Dtype(reduce=BF16),
    "fp16": Dtype(param=F16, reduce=F16),
    "fp16, reduced in fp32": Dtype(param=F16, reduce=F32),
    "model in bf16": Dtype(model=BF16),
    "model in fp64": Dtype(model=F64, refused="reduces gradients of torch.float64"),
    "model in fp64, reduced in fp32": Dtype(model=F64, reduce=F32),
}

# Policies


MATRICES = ("*embed.weight", "*up.weight", "*down.weight", "*extra.weight", "*head.weight")


def rule(codec: dict[str, Any], names: Sequence[str] = ("*",)) -> dict[str, Any]:
    return {"when": {"name": list(names)}, "codec": codec, "feedback": {"kind": "residual"}}


POLICIES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "int32x1": rule({"kind": "sketch", "density": 1.0, "symbol": "int32x1"}),
    "sketch": rule({"kind": "sketch", "density": 0.3, "symbol": "int8x4"}),
    "sketch float32": rule({"kind": "sketch", "density": 0.3, "symbol": "float32"}),
    "packed": rule({"kind": "packed", "density": 0.3}),
    "packed shared": rule({"kind": "packed", "density": 0.9, "support": "shared"}),
    "quantized": rule({"kind": "quantized", "bits": 4, "block": 32}),
    "matrix": rule({"kind": "matrix", "group": 16}, names=MATRICES),
}

# APIs


@dataclass(frozen=True, kw_only=True)
class Api:
    """A way to shard.

    Attributes:
        options: by name.
        native: shards a model for native FSDP.
        wrapped: shards a model and wraps it with a rule, or with policy `dense`.
        gradients: the gradient shard ``[S]`` of every unit of a plan, in float64, in FSDP's
            columns.
        replicas: copies of the sharded model, among 4 ranks.
        averages: whether tagc always averages, whatever native FSDP divides by and when.
        refuses: words of the error that a policy must raise, by its name. (With the plain option,
            in fp32; others add nothing.)
    """

    options: Mapping[str, Option]
    native: Callable[[Option, Dtype], Any]
    wrapped: Callable[[Option, Dtype, dict[str, Any] | None], Any]
    gradients: Callable[[Any, Sequence[UnitPlan]], list[Tensor]]
    replicas: int = 1
    averages: bool = False
    refuses: Mapping[str, str] = field(default_factory=dict)


def built(option: Option, dtype: Dtype, **where: Any) -> Any:
    torch.manual_seed(1)
    model = Net(**option.net).to(dtype.model)
    option.prepare(model)
    option.shard(model, mp_policy=dtype.mixed, **where)
    option.configure(model)
    return model


def wrap(model: Any, policy: dict[str, Any] | None, **where: Any) -> Any:
    spec: Any = "dense"
    if policy is not None:
        spec = {"schema": 1, "gradients": [policy]}
        if where:
            # No copy of a shard is its owner, to choose for the others.
            own = {key: value for key, value in policy["codec"].items() if key != "support"}
            spec["replicas"] = [policy | {"codec": own}]
    with warnings.catch_warnings():
        # Units as small as these may well cost more compressed.
        warnings.simplefilter("ignore")
        return tagc.wrap(model, spec, **where)


def fsdp2_wrapped(option: Option, dtype: Dtype, policy: dict[str, Any] | None) -> Any:
    return wrap(built(option, dtype), policy)


def fsdp2_gradients(model: Any, units: Sequence[UnitPlan]) -> list[Tensor]:
    params: dict[str, Any] = {plain(name): p for name, p in model.named_parameters()}
    found = []
    for unit in units:
        columns = torch.zeros(unit.columns, dtype=torch.float64)
        at = 0
        for param in (p for segment in unit.segments for p in segment.params):
            grad = params[param.name].grad
            if grad is not None:
                shard = grad.to_local().flatten()
                columns[at : at + shard.numel()] = shard
            at += param.columns
        found.append(columns)
    return found


def fsdp1_built(option: Option, dtype: Dtype) -> Any:
    torch.manual_seed(1)
    model = Net(**option.net).to(dtype.model)
    option.prepare(model)
    mixed = MixedPrecision(param_dtype=dtype.param, reduce_dtype=dtype.reduce)
    sharded = option.shard(model, mixed_precision=mixed, device_id=torch.device("cpu"))
    option.configure(sharded)
    return sharded


def fsdp1_wrapped(option: Option, dtype: Dtype, policy: dict[str, Any] | None) -> Any:
    rule = policy and policy | {"when": {"name": option.names}}
    return wrap(fsdp1_built(option, dtype), rule)


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
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def two_by_two() -> Any:
    """One mesh for all cases of a process group: it takes groups of its own."""
    if not _meshes or _meshes[0] is not dist.group.WORLD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        _meshes[:] = [dist.group.WORLD, mesh]
    return _meshes[1]


_meshes: list[Any] = []


def replicas_wrapped(option: Option, dtype: Dtype, policy: dict[str, Any] | None) -> Any:
    mesh = two_by_two()
    return wrap(built(option, dtype, mesh=mesh["shard"]), policy, replicas=mesh["replicate"])


APIS: dict[str, Api] = {
    "FSDP2": Api(options=FSDP2, native=built, wrapped=fsdp2_wrapped, gradients=fsdp2_gradients),
    "FSDP2, replicas": Api(
        options=REPLICAS,
        native=lambda option, dtype: built(option, dtype, mesh=two_by_two()),
        wrapped=replicas_wrapped,
        gradients=fsdp2_gradients,
        replicas=2,
    ),
    "FSDP1": Api(
        options=FSDP1,
        native=fsdp1_built,
        wrapped=fsdp1_wrapped,
        gradients=fsdp1_gradients,
        averages=True,
        refuses={"matrix": "sharded by FSDP1, which cuts through rows"},
    ),
}

# Cases


@dataclass(frozen=True, kw_only=True)
class Case:
    api: str
    dtype: str
    ranks: int
    option: str
    policy: str

    def __str__(self) -> str:
        return f"{self.api}-{self.option}-{self.dtype}-{self.ranks} ranks-{self.policy}"

    @property
    def group(self) -> tuple[str, int, str, str]:
        """Cases with the same native model."""
        return self.api, self.ranks, self.option, self.dtype

    @property
    def refused(self) -> str:
        """Words of the error that is expected, if one is."""
        option, dtype = APIS[self.api].options[self.option], DTYPES[self.dtype]
        if self.policy == "dense":
            return option.refused_dense
        return dtype.refused or option.refused or APIS[self.api].refuses.get(self.policy, "")


def cases() -> list[Case]:
    """The matrix: every option in fp32, and every dtype, with every policy, on ranks in turn; the
    plain option on every number of ranks."""
    rows: dict[tuple[str, str, int, str], None] = {}
    for name, api in APIS.items():
        for i, (option, spec) in enumerate(api.options.items()):
            ranks = (4,) if api.replicas > 1 else spec.ranks
            rows[name, "fp32", ranks[i % len(ranks)], option] = None
        for i, dtype in enumerate(DTYPES):
            rows[name, dtype, 4 if api.replicas > 1 else 2 + i % 4, "plain"] = None
        for ranks in () if api.replicas > 1 else (2, 3, 4, 5):
            rows[name, "fp32", ranks, "plain"] = None
    found = [
        Case(api=api, dtype=dtype, ranks=ranks, option=option, policy=policy)
        for api, dtype, ranks, option in rows
        for policy in POLICIES
        if policy not in APIS[api].refuses or (dtype, option) == ("fp32", "plain")
    ]
    return sorted(found, key=lambda case: (list(APIS).index(case.api), case.ranks))


# Running them


@dataclass(frozen=True)
class Outcome:
    """passed, refused with a message, or failed with a traceback."""

    kind: str
    said: str = ""


def run(selected: Sequence[Case]) -> dict[Case, Outcome]:
    """What became of the cases, by case."""
    outcomes: dict[Case, Outcome] = {}
    by_ranks = sorted(selected, key=lambda case: case.ranks)
    for ranks, some in groupby(by_ranks, key=lambda case: case.ranks):
        here = list(some)
        answers = run_ranks(run_on_a_rank, ranks, here, timeout=30 + 3 * len(here))
        for case, said in zip(here, zip(*answers, strict=True), strict=True):
            worst = [o for o in said if o.kind == "failed"] or list(said)
            outcomes[case] = worst[0]
            if len({o.kind for o in said}) > 1:
                outcomes[case] = Outcome("failed", f"ranks differ: {said}")
    return outcomes


def run_on_a_rank(rank: int, selected: Sequence[Case]) -> list[Outcome]:
    outcomes = {}
    for _, some in groupby(sorted(selected, key=lambda c: c.group), key=lambda c: c.group):
        natives: list[History] = []
        for case in some:
            outcomes[case] = outcome(rank, case, natives)
    return [outcomes[case] for case in selected]


def outcome(rank: int, case: Case, natives: list[History]) -> Outcome:
    try:
        check(rank, case, natives)
    except Exception as error:
        if case.refused and case.refused in str(error):
            return Outcome("refused", str(error))
        return Outcome("failed", traceback.format_exc())
    return Outcome("failed", "was not refused") if case.refused else Outcome("passed")


def check(rank: int, case: Case, natives: list[History]) -> None:
    api, dtype = APIS[case.api], DTYPES[case.dtype]
    option, policy = api.options[case.option], POLICIES[case.policy]
    with recorded() as amounts:
        wrapped = api.wrapped(option, dtype, policy)
        units = tagc.compressor(wrapped).plan().units
        mine = history(rank, api, option, wrapped, units)
    if not natives:
        natives.append(history(rank, api, option, api.native(option, dtype), units))
    theirs = natives[0]
    if policy is None:
        for one, other in zip(mine.all, theirs.all, strict=True):
            assert torch.equal(one, other), f"{(one - other).abs().max():.3g} off"
        assert any(bool(grad.any()) for grad in mine.all)
        return
    how = reduction(api, option, dtype)
    owed, amount = owes(wrapped, how), spread(wrapped, how, amounts)
    reductions = tagc.compressor(wrapped).metrics().steps
    assert tagc.compressor(wrapped).metrics().unresolved == 0
    assert case.policy == "int32x1" or any(bool(o.any()) for o in owed), "nothing was held back"
    for got, native, left, size in zip(mine.sums, theirs.sums, owed, amount, strict=True):
        off = (got + left - native).abs()
        allowed = bound(case.ranks, reductions, dtype) * api.replicas * size + tiny(dtype)
        assert bool((off <= allowed).all()), f"{off.max():.3g} lost of {size.max():.3g}"
        assert native.any() or not size.any()
    if case.policy == "int32x1" and api.replicas == 1:
        check_steps(wrapped, how, owed)


@dataclass(frozen=True)
class History:
    """Gradient shards of the units.

    Attributes:
        sums: over the steps, as backward leaves them.
        all: of every step, as the optimizer gets them.
    """

    sums: list[Tensor]
    all: list[Tensor]


def history(rank: int, api: Api, option: Option, model: Any, units: Sequence[UnitPlan]) -> History:
    """All steps, with the same weights."""
    sums: list[Tensor] = []
    every: list[Tensor] = []
    for step in range(STEPS):
        option.backward(model, rank, step)
        grads = api.gradients(model, units)
        sums = [s + g for s, g in zip(sums, grads, strict=True)] if sums else grads
        option.after(model)
        every += grads if option.after is nothing else api.gradients(model, units)
        model.zero_grad()
    return History(sums, every)


@contextmanager
def recorded() -> Iterator[dict[int, Tensor]]:
    """Magnitudes of what every reducer was handed, by its identity. Enter it before wrapping.

    Codec ``matrix`` has no code for 0, so what it sends may be more than what there was, and counts
    as well.
    """
    amounts: dict[int, Tensor] = {}
    original = UnitReducer.reduce

    def reduce(self: UnitReducer, out: Tensor, inp: Tensor, *how: Any) -> None:
        size = inp.view(self.plan.destinations, -1).double().abs()
        if self.plan.info.flat is not None:
            size *= planned(self.plan)
        owed = {s.start: self.residuals[s.start].double() for s in self.plan.of(MatrixPlan)}
        rows = inp.view(self.plan.destinations, -1).double()
        original(self, out, inp, *how)
        for segment in self.plan.of(MatrixPlan):
            here = slice(segment.start, segment.stop)
            x = rows[:, here] + owed[segment.start]
            size[:, here] += (x - self.residuals[segment.start].double()).abs()
        amounts[id(self)] = amounts.get(id(self), torch.zeros_like(size)) + size

    with patch.object(UnitReducer, "reduce", reduce):
        yield amounts


Divisors = Callable[[int], tuple[float, float]]


def reduction(api: Api, option: Option, dtype: Dtype) -> Divisors:
    """By what the sum over so many ranks is divided: in the reduction, and by FSDP after it."""

    def divisors(ranks: int) -> tuple[float, float]:
        if api.averages:
            return ranks, 1
        if dtype.reduced != F16:
            return (1, option.divides(ranks)) if option.sums else (ranks, 1)
        # FSDP divides a part of it before it sums, where float16 might overflow.
        total, before = option.divides(ranks) if option.sums else ranks, 1
        while total % before == 0 and total / before > before:
            before *= 2
        return 1, total / before

    return divisors


def owes(wrapped: Any, how: Divisors) -> list[Tensor]:
    """What all ranks together owe this rank's shards, in the units of the gradient."""
    held = {}
    installed = tagc.compressor(wrapped)._installed
    for reducer in (*installed.reducers, *installed.replicas):
        plan = reducer.plan
        rows = torch.zeros(plan.destinations, plan.buffer_columns, dtype=torch.float64)
        for segment in plan.compressed:
            residual = reducer.residuals[segment.start]
            seen = torch.zeros_like(residual, dtype=torch.bool)
            for row in range(plan.destinations):
                for column, start, length in spans(plan, segment, row):
                    here = slice(column, column + length)
                    rows[row, start : start + length] = residual[row, here]
                    seen[row, here] = True
            assert not residual[~seen].any(), "something is owed to padding"
        held[id(reducer)] = rows
    return spread(wrapped, how, held)


def planned(plan: UnitPlan) -> Tensor:
    """Which elements of FSDP's rows ``[W, S]`` are the plan's: FSDP1 reduces the gradients of
    frozen parameters, too, and then drops them."""
    mask = torch.zeros(plan.destinations, plan.buffer_columns, dtype=torch.float64)
    for row in range(plan.destinations):
        for segment in plan.segments:
            for _, start, length in spans(plan, segment, row):
                mask[row, start : start + length] = 1
    return mask


def spans(plan: UnitPlan, segment: Segment, row: int) -> list[tuple[int, int, int]]:
    """Column in a segment, the same one in FSDP's row, and how many follow in both."""
    if plan.info.flat is None:
        return [(0, segment.start, segment.columns)]
    found = pieces(plan.info, segment.params)
    return [(piece.column, piece.start, piece.length) for piece in found if piece.row == row]


def spread(wrapped: Any, how: Divisors, rows: Mapping[int, Tensor]) -> list[Tensor]:
    """Rows ``[W, S]`` that every rank has for every shard, as they add up in the gradients of
    this rank's shards ``[S]``."""
    compressor = tagc.compressor(wrapped)
    installed = compressor._installed
    found = []
    for i, reducer in enumerate(installed.reducers):
        group, W = compressor._units[i].group, reducer.plan.info.world_size
        inside, after = how(W)
        shape = (W, reducer.plan.buffer_columns)
        total = rows.get(id(reducer), torch.zeros(shape, dtype=torch.float64)).clone()
        dist.all_reduce(total, group=group)
        mine = total[group.rank()] / inside
        if installed.replicas:
            replicas = two_by_two()["replicate"].get_group()
            mine += rows.get(id(installed.replicas[i]), torch.zeros(1, shape[1]))[0]
            dist.all_reduce(mine, group=replicas)
            mine /= replicas.size()
        found.append(mine / after)
    return found


def bound(ranks: int, reductions: int, dtype: Dtype) -> float:
    """Roundings of an element, relative to the sum of the magnitudes that went in.

    A reduction adds the residual and rounds what is left of it (2), adds up what the ranks send
    (as many, each at most twice what is there, since a code is at most twice its element), divides
    and converts (2). Natively the ranks' gradients are added up, divided, converted. What is there
    in any of the reductions is at most all that came in until then.

    FSDP1 divides before the sum, too, by a power of two: exactly, but for what `tiny` allows, as
    long as a gradient is none of the subnormal float32 or bfloat16 numbers. So are 1.5 and 2.5,
    by which it divides afterwards. Adding up shards is one more rounding for each (2): of
    4 R + 8 roundings that are allowed 3 R + 8 can happen.
    """
    final = torch.float32 if dtype.model == F64 else dtype.model
    unit = max(torch.finfo(t).eps / 2 for t in (dtype.reduced, final, F32))
    return 2 * (2 * ranks + 4) * reductions * unit


def tiny(dtype: Dtype) -> float:
    """Where numbers have no more bits to lose relatively."""
    return 64 * 2.0**-24 if dtype.reduced == F16 else 0.0


def check_steps(wrapped: Any, how: Divisors, owed: Sequence[Tensor]) -> None:
    """Nobody owes an element more than half a step of its shard's."""
    compressor = tagc.compressor(wrapped)
    for i, reducer in enumerate(compressor._installed.reducers):
        W, own = reducer.plan.info.world_size, compressor._units[i].group.rank()
        for j, part in enumerate(reducer.sketch.parts):
            half = reducer.sketch._steps[j, own].item() / 2
            # Thresholds are sizes of elements, and steps a small part of them.
            assert 2 * half <= 2**-14 * reducer.sketch.steering.threshold[j, own].item()
            most = W * half / math.prod(how(W))
            for _, start, length in spans(reducer.plan, part.segment, own):
                columns = owed[i][start : start + length]
                assert bool((columns.abs() <= most * (1 + 2**-20)).all())


# Printing them

_SIGNS = {"passed": "✓", "refused": "refused", "failed": "**FAILED**"}


def table(outcomes: Mapping[Case, Outcome]) -> str:
    """Markdown: a row an option, dtype and number of ranks, a column a policy."""
    lines: list[str] = []
    counts = {kind: sum(o.kind == kind for o in outcomes.values()) for kind in _SIGNS}
    lines += ["# Parity with native FSDP", ""]
    lines.append(
        f"{len(outcomes)} combinations: {counts['passed']} passed, {counts['refused']} refused "
        f"with a message, {counts['failed']} failed. Printed by `make parity`, torch "
        f"{torch.__version__.split('+')[0]}, CPU and gloo. What passing means, and how a case is "
        "run, is in [tests/parity.py](../tests/parity.py): `dense` has the bits of native FSDP, "
        "and with every other policy the gradients handed out and what ranks still owe add up to "
        "the native gradients. Options and policies have the names there."
    )
    said: dict[str, None] = {}
    for api in APIS:
        mine = {case: o for case, o in outcomes.items() if case.api == api}
        lines += ["", f"## {api}", "", f"| option | dtype | ranks | {' | '.join(POLICIES)} |"]
        lines.append("|---|---|---|" + "---|" * len(POLICIES))
        rows: dict[tuple[str, str, int], dict[str, str]] = {}
        for case, result in mine.items():
            row = rows.setdefault((case.option, case.dtype, case.ranks), {})
            row[case.policy] = _SIGNS[result.kind]
            if result.kind == "refused":
                number = list(said).index(key) + 1 if (key := case.refused) in said else 0
                if not number:
                    said[key] = None
                    number = len(said)
                row[case.policy] += f" [{number}]"
        order = list(APIS[api].options)
        for (option, dtype, ranks), row in sorted(
            rows.items(), key=lambda r: (list(DTYPES).index(r[0][1]), order.index(r[0][0]), r[0][2])
        ):
            size = "2 × 2" if APIS[api].replicas > 1 else str(ranks)
            cells = " | ".join(row.get(policy, "") for policy in POLICIES)
            lines.append(f"| {option} | {dtype} | {size} | {cells} |")
    messages = {case.refused: o.said for case, o in outcomes.items() if o.kind == "refused"}
    lines += ["", "## What refusals say", ""]
    lines += [f"{i}. {' '.join(messages[key].split())}" for i, key in enumerate(said, 1)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    outcomes = run(quick_cases() if args.quick else cases())
    print(table(outcomes))
    for case, result in outcomes.items():
        if result.kind == "failed":
            print(f"{case}:\n{result.said}", file=sys.stderr)
    sys.exit(any(o.kind == "failed" for o in outcomes.values()))


def quick_cases() -> list[Case]:
    """Of every row but the slow ones, `dense` and one of the other policies in turn; for FSDP1,
    whose own tests compare bits of most options, either of them."""
    found = []
    others = [policy for policy in POLICIES if policy != "dense"]
    for i, ((api, _, option, dtype), row) in enumerate(groupby(cases(), key=lambda c: c.group)):
        if option == "compiled blocks" or (api != "FSDP2" and dtype not in ("fp32", "bf16")):
            continue
        picked = ["dense", others[i % len(others)]]
        if api == "FSDP1":
            taken = [policy for policy in others if policy not in APIS[api].refuses]
            picked = ["dense"] if i % 2 else [taken[i // 2 % len(taken)]]
        found += [case for case in row if case.policy in picked]
    return found


if __name__ == "__main__":
    main()

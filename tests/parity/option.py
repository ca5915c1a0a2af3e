"""One way to use FSDP, and what both versions of FSDP have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .model import loss_of


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
        resumes: whether tagc's state is saved between two steps, and loaded after one step more.
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
    resumes: bool = False
    ranks: Sequence[int] = (2, 3, 2, 3, 4, 2, 3, 5)
    names: str = "*"
    refused: str = ""
    refused_dense: str = ""


def some(options: Mapping[str, Option], names: str, **changes: Any) -> dict[str, Option]:
    """Options by name, with other attributes."""
    return {name: replace(options[name], **changes) for name in names.split("; ")}


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


def synced(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        loss_of(model, rank, 3 * step + micro).backward()


def on_even_ranks(model: Any, rank: int, step: int) -> None:
    once(model, rank, step, take_extra=rank % 2 == 0)


_meshes: list[Any] = []


def two_by_two() -> Any:
    """One mesh for all cases of a process group: it takes groups of its own."""
    if not _meshes or _meshes[0] is not dist.group.WORLD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        _meshes[:] = [dist.group.WORLD, mesh]
    return _meshes[1]


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """Of the model, and a mixed precision policy.

    Attributes:
        refused: words of the error that policies which compress raise.
        refused_changes: likewise, those which send changes of parameters.
    """

    model: torch.dtype = torch.float32
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    refused: str = ""
    refused_changes: str = ""

    @property
    def mixed(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param, reduce_dtype=self.reduce)

    @property
    def reduced(self) -> torch.dtype:
        return self.reduce or self.param or self.model


DTYPES: dict[str, Dtype] = {
    "fp32": Dtype(),
    "bf16": Dtype(param=BF16, reduce=BF16),
    "bf16, reduced in fp32": Dtype(param=BF16, reduce=F32),
    "reduced in bf16": Dtype(reduce=BF16),
    "fp16": Dtype(param=F16, reduce=F16),
    "fp16, reduced in fp32": Dtype(param=F16, reduce=F32),
    "model in bf16": Dtype(model=BF16),
    "model in fp64": Dtype(model=F64, refused="reduces gradients of torch.float64"),
    "model in fp64, reduced in fp32": Dtype(
        model=F64, reduce=F32, refused_changes="gathers parameters of torch.float64"
    ),
}


MATRICES = ("*embed.weight", "*up.weight", "*down.weight", "*extra.weight", "*head.weight")


CHANGES = {"when": {"name": ["*"]}, "codec": {"kind": "delta", "bits": 4, "block": 32}}


def rule(codec: dict[str, Any], names: Sequence[str] = ("*",)) -> dict[str, Any]:
    return {"when": {"name": list(names)}, "codec": codec, "feedback": {"kind": "residual"}}


POLICIES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "int32x1": rule({"kind": "sketch", "density": 1.0, "symbol": "int32x1"}),
    "sketch": rule({"kind": "sketch", "density": 0.3, "symbol": "int8x4"}),
    "quantized": rule({"kind": "quantized", "bits": 4, "block": 32}),
    "matrix": rule({"kind": "matrix"}, names=MATRICES),
    # Nothing changes here, so that all ranks have the exact parameters.
    "changes": rule({"kind": "quantized", "bits": 4, "block": 32}) | {"parameters": CHANGES},
}

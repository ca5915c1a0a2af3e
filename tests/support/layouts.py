"""Small models on ranks in any layout, and what the ranks keep, by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc
from support import fsdp1_net, parallel_net, small_net
from support.states import in_whole, wrapped
from tagc.attach import ddp
from tagc.checkpoint.by_parameter import split_part


@dataclass(frozen=True)
class Layout:
    """How ranks share a model.

    Attributes:
        data: ranks over which FSDP shards each copy, or over which the model is replicated.
        per_host: ranks that share a host; None if every rank sends for itself.
        tensor: tensor-parallel ranks; 0 for the model that has no tensor parallelism.
        replicas: copies, over which tagc averages.
        dtype: in which FSDP2 gathers parameters.
    """

    data: int
    api: Literal["DDP", "FSDP1", "FSDP2", "replicate"] = "FSDP2"
    per_host: int | None = None
    tensor: int = 0
    replicas: int = 1
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        text = f"{self.api} {self.data}"
        text += f" hosts-of-{self.per_host}" if self.per_host else ""
        text += f" tensor-{self.tensor}" if self.tensor else ""
        text += f" replicas-{self.replicas}" if self.replicas > 1 else ""
        return text + (f" {self.dtype}" if self.dtype else "")

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.data * max(1, self.tensor) * self.replicas

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's parameters."""
        model: nn.Module = parallel_net.Block() if self.tensor else small_net.net()
        return {name: tuple(param.shape) for name, param in model.named_parameters()}

    def wrapped(self, policy: dict[str, Any]) -> Any:
        """The model on this rank."""
        with patch.object(ddp, "UNIT_BYTES", 2000):  # several units
            return wrapped(policy, self.sharded(), hosts=self.per_host)

    def sharded(self) -> Any:
        if self.tensor:
            return parallel_net.parallel(self.data, self.tensor, replicas=self.replicas)
        if self.api == "DDP":
            return DistributedDataParallel(small_net.net())
        if self.api == "FSDP1":
            return fsdp1_net.sharded(use_orig_params=True)
        if self.api == "replicate":
            model = small_net.net()
            for module in (model.first, model.second, model):
                replicate(module)
            return model
        if self.replicas == 1:
            mixed = MixedPrecisionPolicy(self.dtype, torch.float32)
            return small_net.sharded(mp_policy=mixed)
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (self.replicas, self.data), mesh_dim_names=names)
        model = small_net.net()
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh)
        return model

    def run(self, model: nn.Module, rank: int, steps: range) -> None:
        """Train. Tensor-parallel ranks share their data. Gradients are large in the second step, so
        that all that follows their size has moved."""
        loss_of = parallel_net.loss_of if self.tensor else small_net.loss_of
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for step in steps:
            loss = loss_of(model, rank // max(1, self.tensor), step)
            (loss * (50 if step == 1 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()


Kept = dict[str, tuple[int, Tensor]]


def kept(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> Kept:
    """This rank's residuals, and what it keeps as an owner, in the parameters' shapes, float64; and
    which of tensor parallelism's duplicates it has."""
    found: Kept = {}
    for full, tensor in tagc.compressor(model).state_dict().items():
        name = full.split(".", 4)[-1]
        kind = name.split(".")[0]
        if kind in ("residual", "owner_residual", "sent"):
            parameter, whole = in_whole(name.split(".", 2)[2], tensor, shapes)
            duplicate = split_part(name)[1].duplicate or (0, 1)
            of = ".".join([*name.split(".", 2)[:2], parameter])
            before = found[of][1] if of in found else 0
            found[of] = duplicate[0], before + whole
    return found


def totals(ranks: Sequence[Kept]) -> dict[str, list[Tensor]]:
    """The sums over ranks, for each duplicate."""
    sums: dict[str, dict[int, Tensor]] = {}
    for of in ranks:
        for name, (duplicate, whole) in of.items():
            by_duplicate = sums.setdefault(name, {})
            by_duplicate[duplicate] = by_duplicate.get(duplicate, 0) + whole
    return {name: [found[i] for i in sorted(found)] for name, found in sums.items()}

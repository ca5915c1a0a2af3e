"""One rank's real training of one method: model, sharding, optimizer, step."""

from __future__ import annotations

import functools
import math
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import LowPrecisionState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tagc
from benchmarks.network import ledger
from benchmarks.network.baselines import AllToAllReduceScatter, CastAllGather, bf16_compress_hook
from benchmarks.network.methods import Method
from examples.gpt import GPT, Block, GPTConfig
from examples.text import Corpus
from tagc.comm import HostGroups, RankOnHost, gather_by_rank
from tagc.comm.hosts import host_groups

# Thresholds and moments settle before anything is timed.
_SETTLE_STEPS = 8
_FSDP1_PREFIX = "_fsdp_wrapped_module."


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every method of a run shares.

    Attributes:
        width, layers, heads, context: of the byte-level GPT.
        batch: sequences per rank and micro-batch.
        micro_batches: backwards for each step of the optimizer. With a policy on hosts, gradients
            stay inside the host but for the last.
        lr: peak learning rate.
        loss_steps: length of the schedule: a tenth to warm up, then a cosine down to a tenth.
        reshard: whether parameters are freed after forward and gathered again for backward
            (ZeRO-3, FSDP2's default), or kept (ZeRO-2).
        seed: of weights and batches.
    """

    width: int = 320
    layers: int = 8
    heads: int = 5
    context: int = 128
    batch: int = 1
    lr: float = 1e-3
    loss_steps: int = 100
    reshard: bool = True
    seed: int = 0
    micro_batches: int = 1

    @property
    def key(self) -> dict[str, Any]:
        """What tells results of different settings apart."""
        key = asdict(self)
        if self.micro_batches == 1:
            del key["micro_batches"]
        return key


class Model(GPT):
    """The example's GPT with the loss in fp32 whatever the parameters are, as models have it."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.transformer(tokens)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """One rank of one method's training, from the same weights and batches as all others.

    Attributes:
        steps: optimizer steps done.
        ranks_per_host: that share its link.
        parameters: elements of the whole model.
    """

    def __init__(
        self, method: Method, settings: Settings, mesh: DeviceMesh, corpus: Corpus
    ) -> None:
        self.method, self.settings = method, settings
        self._corpus, self._rank, self._ranks = corpus, mesh.get_rank(), mesh.size()
        # As torchrun sets it.
        self.ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.steps = 0
        torch.manual_seed(settings.seed)
        model = Model(
            GPTConfig(
                width=settings.width,
                layers=settings.layers,
                heads=settings.heads,
                context=settings.context,
            )
        )
        self.parameters = sum(p.numel() for p in model.parameters())
        # FSDP1 flattens its shards, so the shapes are read before.
        matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
        self._model = _shard(model, method, settings, mesh, self.ranks_per_host)
        named = {n.replace(_FSDP1_PREFIX, ""): p for n, p in self._model.named_parameters()}
        self._parameters = list(named.values())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in named.items() if n in matrices], "weight_decay": 0.1},
                {"params": [p for n, p in named.items() if n not in matrices], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(0.9, 0.95),
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, functools.partial(_learning_rate, total=settings.loss_steps)
        )

    @property
    def settle_steps(self) -> int:
        """Steps before this method's time and bytes are those of the long run."""
        compressor = self._compressor
        warm_up = 0 if compressor is None else compressor.plan().warmup_steps
        return warm_up + _SETTLE_STEPS

    @property
    def tagc_bytes(self) -> tuple[int, int] | None:
        """Bytes of gradients, and of parameters where a policy takes those from FSDP, that this
        rank sent so far by tagc's own count; None without tagc."""
        compressor = self._compressor
        if compressor is None:
            return None
        metrics = compressor.metrics()
        return metrics.wire_bytes, metrics.parameter_wire_bytes

    @property
    def compressed_elements(self) -> int | None:
        """Elements of the whole model's gradient that tagc compresses, padding included."""
        compressor = self._compressor
        if compressor is None:
            return None
        units = compressor.plan().units
        columns = sum(s.columns for unit in units for s in unit.segments if s.compressed)
        return columns * self._ranks

    @property
    def _adds_up_inside(self) -> bool:
        """Whether a micro-batch's gradients can wait inside the host."""
        return self.method.policy is not None and self.ranks_per_host > 1

    @property
    def _compressor(self) -> tagc.Compressor | None:
        return None if self.method.policy is None else tagc.compressor(self._model)

    def step(self) -> tuple[float, float, float]:
        """One optimizer step: its loss on this rank, its seconds, and of these the ones spent in
        communication. Reading the batch is not timed."""
        s = self.settings
        batches = [
            self._corpus.batch(s.batch, s.context, seed=s.seed, step=step, rank=self._rank)
            for step in range(s.micro_batches * self.steps, s.micro_batches * (self.steps + 1))
        ]
        waited, start = ledger.tally().seconds, time.perf_counter()
        losses = []
        for i, (tokens, targets) in enumerate(batches, start=1):
            if s.micro_batches > 1 and self._adds_up_inside:
                assert isinstance(self._model, FSDPModule)
                self._model.set_requires_all_reduce(i == s.micro_batches)
            loss = self._model(tokens, targets) / s.micro_batches
            loss.backward()
            losses.append(loss.detach())
        self._clip()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - start
        self.steps += 1
        return sum(loss.item() for loss in losses), seconds, ledger.tally().seconds - waited

    @torch.no_grad()
    def validation_loss(self, windows: int) -> float:
        """Mean loss in nats per byte over about ``windows`` held-out windows, all ranks'."""
        batch = self._corpus.held_out(
            windows, self.settings.context, rank=self._rank, ranks=self._ranks
        )
        loss = self._model(*batch).detach() / self._ranks
        dist.all_reduce(loss)
        return loss.item()

    def _clip(self, largest: float = 1.0) -> None:
        # By hand, since torch has one function for FSDP1 and another for FSDP2. The shards
        # partition the gradient, so its squared norm is the sum of theirs.
        grads = [_local(p.grad) for p in self._parameters if p.grad is not None]
        square = torch.stack([g.square().sum() for g in grads]).sum()
        with ledger.direction(ledger.OTHER):
            dist.all_reduce(square)
        factor = torch.clamp(largest / (square.sqrt() + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor)


def _shard(
    model: nn.Module, method: Method, settings: Settings, mesh: DeviceMesh, ranks_per_host: int
) -> nn.Module:
    if method.sharding == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        wrapped.register_comm_hook(LowPrecisionState(mesh.get_group()), bf16_compress_hook)
        return wrapped
    bf16 = torch.bfloat16 if method.mixed_precision else None
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16),
            # None is torch's choice: all but the root.
            reshard_after_forward=None if settings.reshard else False,
        )
    hosts = _hosts(mesh, ranks_per_host) if ranks_per_host > 1 and method.messages else None
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        messages = method.messages
        if method.gather == "bfloat16" or messages:
            wire = getattr(torch, method.gather)
            module.set_custom_all_gather(CastAllGather(wire, messages=messages, hosts=hosts))
        if method.policy is None and method.reduce != "gloo":
            wire = getattr(torch, method.reduce)
            module.set_custom_reduce_scatter(
                AllToAllReduceScatter(wire, messages=messages, hosts=hosts)
            )
    if method.policy is None:
        return model
    levels = ranks_per_host if ranks_per_host > 1 else None
    return tagc.wrap(model, policy=method.policy, hosts=levels)


def _hosts(mesh: DeviceMesh, ranks_per_host: int) -> HostGroups:
    """The groups of this rank for dense training in two levels."""
    group = mesh.get_group()
    said = gather_by_rank([group], {dist.get_rank(): RankOnHost.mine()})
    return host_groups(group, ranks_per_host, torch.device("cpu"), said)


def _learning_rate(step: int, *, total: int) -> float:
    warm_up = max(1, total // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad  # pyright: ignore

"""One rank's real training of one method: model, sharding, optimizer, step."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc
from examples.gpt import GPT, Block, GPTConfig
from examples.text import Corpus
from tagc.collect import HostGroups, RankOnHost, gather_by_rank
from tagc.collect.hosts import host_groups

from ..gloo import clip, with_powersgd
from . import ledger
from .baselines import MessageAllGather, MessageReduceScatter
from .methods import Method, Settings

# Thresholds and moments settle before anything is timed.
_SETTLE_STEPS = 8
_RATE = 1e-3


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
        torch.manual_seed(0)
        sizes = ("width", "layers", "heads", "context")
        model = Model(GPTConfig(**{name: getattr(settings, name) for name in sizes}))
        self.parameters = sum(p.numel() for p in model.parameters())
        self._model = _shard(model, method, mesh, self.ranks_per_host)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_RATE, betas=(0.9, 0.95))
        # Of a site: the handle, and the optimizer steps between two exchanges.
        self.sites: Any = None
        self.every = 0
        if method.apart and method.policy is not None:
            self.sites = tagc.sites(self._model, self._optimizer, method.policy)
            self.every = self.sites.plan().policy.sites.every

    @property
    def settle_steps(self) -> int:
        """Steps before this method's time and bytes are those of the long run."""
        if self.sites is not None:
            # One exchange; the next ones are in the middle of the periods that are timed.
            return self.every + self.every // 2
        warm_up = self._compressor.plan().warmup_steps if self._compressor else 0
        return warm_up + _SETTLE_STEPS

    @property
    def tagc_bytes(self) -> dict[str, int]:
        """Bytes of gradients, and of parameters where a policy takes those from FSDP, that this
        rank sent so far by tagc's own count; nothing without tagc."""
        if self._compressor is None:
            return {}
        metrics = self._compressor.metrics()
        return {"gradients": metrics.wire_bytes, "parameters": metrics.parameter_wire_bytes}

    @property
    def _compressor(self) -> tagc.Compressor | None:
        if self.method.policy is None or self.method.apart:
            return None
        return tagc.compressor(self._model)

    def step_elsewhere(self, took: float) -> float:
        """A step as if a device had taken it in ``took`` seconds and left the cores idle: the
        optimizer finds no gradients, and its hooks run. Returns its seconds."""
        start = time.perf_counter()
        time.sleep(took)
        self._optimizer.step()
        self.steps += 1
        return time.perf_counter() - start

    def step(self) -> tuple[float, float]:
        """One optimizer step: its seconds, and how many of them were spent in communication.
        Reading the batch is not timed."""
        s = self.settings
        batches = [
            self._corpus.batch(s.batch, s.context, seed=0, step=step, rank=self._rank)
            for step in range(s.micro_batches * self.steps, s.micro_batches * (self.steps + 1))
        ]
        waited, start = ledger.tally().seconds, time.perf_counter()
        # A micro-batch's gradients can wait inside the host.
        waits = self.method.policy is not None and self.ranks_per_host > 1
        for i, (tokens, targets) in enumerate(batches, start=1):
            if waits and isinstance(self._model, FSDPModule):
                self._model.set_requires_all_reduce(i == s.micro_batches)
            (self._model(tokens, targets) / s.micro_batches).backward()
        with ledger.direction(ledger.OTHER):
            clip(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - start
        self.steps += 1
        return seconds, ledger.tally().seconds - waited


def _shard(model: nn.Module, method: Method, mesh: DeviceMesh, ranks_per_host: int) -> nn.Module:
    if method.apart:
        return model
    if method.ddp is not None:
        model = _replicate(model, method, mesh)
    else:
        _shard_blocks(model, method, mesh, ranks_per_host)
    if method.policy is None:
        return model
    hosts = ranks_per_host if ranks_per_host > 1 else None
    return tagc.wrap(model, method.policy, hosts=hosts)


def _shard_blocks(model: nn.Module, method: Method, mesh: DeviceMesh, ranks_per_host: int) -> None:
    bf16 = torch.bfloat16 if method.mixed_precision else None
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        precision = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
        fully_shard(module, mesh=mesh, mp_policy=precision)
    if method.wire != "gloo":
        wire = getattr(torch, method.wire)
        hosts = _hosts(mesh, ranks_per_host) if ranks_per_host > 1 else None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(MessageAllGather(wire, hosts))
                if method.policy is None:
                    module.set_custom_reduce_scatter(MessageReduceScatter(wire, hosts))


def _replicate(model: nn.Module, method: Method, mesh: DeviceMesh) -> nn.Module:
    if method.ddp == "PowerSGD":
        return with_powersgd(model, rank=4, first=4)
    replicated = DistributedDataParallel(model, process_group=mesh.get_group())
    if method.ddp == "bf16":
        replicated.register_comm_hook(mesh.get_group(), _in_bf16)
    return replicated


def _in_bf16(group: Any, bucket: Any) -> Any:
    """torch's hook, which DDP refuses on gloo by its name."""
    return bf16_compress_hook(group, bucket)


_in_bf16.__annotations__.clear()  # DDP reads them, and does not know strings


def _hosts(mesh: DeviceMesh, ranks_per_host: int) -> HostGroups:
    """The groups of this rank for dense training in two levels."""
    group = mesh.get_group()
    said = gather_by_rank([group], {dist.get_rank(): RankOnHost.mine()})
    return host_groups(group, ranks_per_host, torch.device("cpu"), said)

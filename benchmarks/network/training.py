"""One rank's real training of one method: model, sharding, optimizer, step.

The dense methods communicate without gloo's waste: its reduce-scatter sends twice what it must, and
in its all-to-all one direction of a link waits for the other. tagc's own messages, whose receives
are posted first, use both directions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn.parallel import DistributedDataParallel

import tagc
from examples.gpt import GPT, Block, GPTConfig
from examples.text import Corpus
from tagc.collect import HostGroups, RankOnHost, Transport, gather_by_rank
from tagc.collect.hosts import host_groups

from ..gloo import clip, with_powersgd
from . import ledger
from .methods import Method, Settings

# Thresholds and moments settle before anything is timed.
_SETTLE_STEPS = 8
_RATE = 1e-3


class Trainer:
    """One rank of one method's training, from the same weights and batches as all others."""

    def __init__(
        self, method: Method, settings: Settings, mesh: DeviceMesh, corpus: Corpus
    ) -> None:
        self.method, self.settings, self._corpus = method, settings, corpus
        # As torchrun sets it.
        self.ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.steps = 0
        torch.manual_seed(0)
        sizes = ("width", "layers", "heads", "context")
        model = GPT(GPTConfig(**{name: getattr(settings, name) for name in sizes}))
        self._model = _shard(model, method, mesh, self.ranks_per_host)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_RATE, betas=(0.9, 0.95))
        # Of a site: the handle, and the optimizer steps between two exchanges.
        self.sites: Any = None
        self.every = 0
        self._compressor: tagc.Compressor | None = None
        if method.policy is not None and method.apart:
            self.sites = tagc.sites(self._model, self._optimizer, method.policy)
            self.every = self.sites.plan().policy.sites.every
        elif method.policy is not None:
            self._compressor = tagc.compressor(self._model)

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
            self._corpus.batch(s.batch, s.context, seed=0, step=step, rank=dist.get_rank())
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
    hosts = ranks_per_host if ranks_per_host > 1 else None
    return model if method.policy is None else tagc.wrap(model, method.policy, hosts=hosts)


def _shard_blocks(model: nn.Module, method: Method, mesh: DeviceMesh, ranks_per_host: int) -> None:
    bf16 = torch.bfloat16 if method.mixed_precision else None
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        precision = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
        fully_shard(module, mesh=mesh, mp_policy=precision)
    if method.wire == "gloo":
        return
    wire, group, hosts = getattr(torch, method.wire), mesh.get_group(), None
    if ranks_per_host > 1:
        places = gather_by_rank([group], {dist.get_rank(): RankOnHost.mine()})
        hosts = host_groups(group, ranks_per_host, torch.device("cpu"), places)
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


def _summed(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum in float32 of the rows that all ranks have for this one."""
    received = torch.empty_like(rows)
    Transport(group).all_to_all(received, rows).wait()
    return received.sum(0, dtype=torch.float32)


class _Messages:
    """What both directions have: the dtype that travels, and with ``hosts`` two levels, inside a
    host and between hosts."""

    def __init__(self, wire: torch.dtype, hosts: HostGroups | None) -> None:
        self._wire, self._hosts = wire, hosts

    def allocate(self, size: Sequence[int | torch.SymInt], **how: Any) -> Tensor:
        return torch.empty(*size, **how)


class MessageReduceScatter(_Messages, ReduceScatter):
    """Reduce-scatter (AVG or SUM) by messages and a sum in fp32 on the owner; on hosts, added up
    inside the host first, then sent to one rank of each other host."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(f"this reduce-scatter averages or sums, it cannot do {op}")
        sent = input_tensor.to(self._wire).view(group.size(), -1)
        if self._hosts is not None:
            sent, group = self._add_inside(sent, self._hosts), self._hosts.across
        total = _summed(sent, group)
        if op == dist.ReduceOp.AVG:
            total /= input_tensor.numel() // output_tensor.numel()
        output_tensor.copy_(total)

    def _add_inside(self, sent: Tensor, hosts: HostGroups) -> Tensor:
        """The host's sums ``[H, S]`` of the rows for the ranks with this place on each host."""
        R = hosts.inside.size()
        by_place = sent.view(-1, R, sent.shape[1]).transpose(0, 1).contiguous()
        return _summed(by_place, hosts.inside).to(self._wire)


class MessageAllGather(_Messages, AllGather):
    """All-gather of fp32 parameters by messages, which all ranks round to ``wire``, their own, too.
    On hosts, a rank sends to one rank of each other host, and inside the host what came."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        # The input is a part of the output, so it is copied even where nothing is cast.
        sent = input_tensor.to(self._wire, copy=True)
        rows = torch.empty_like(output_tensor, dtype=self._wire).view(group.size(), -1)
        with ledger.direction(ledger.PARAMETERS):
            if self._hosts is None:
                Transport(group).gather(rows, sent[None]).wait()
            else:
                self._in_levels(rows, sent, self._hosts)
        output_tensor.copy_(rows.view(-1))

    @staticmethod
    def _in_levels(rows: Tensor, sent: Tensor, hosts: HostGroups) -> None:
        by_host = rows.view(hosts.across.size(), hosts.inside.size(), -1)
        own = hosts.inside.rank()
        Transport(hosts.across).gather(by_host[:, own], sent[None]).wait()
        for of_host in by_host:
            Transport(hosts.inside).gather(of_host, of_host[own][None]).wait()

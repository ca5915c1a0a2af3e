"""Ranks of a benchmark on one machine: their processes, and what DDP and FSDP2 need there."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def on_ranks(work: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What ``work(rank, *args)`` returns on each rank of a gloo group. A rank has one thread."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, work, args), nprocs=ranks)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: Any, args: tuple) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
        # Ranks share the cores. With this policy, a woken thread does not displace one that runs.
        # Otherwise gloo's thread displaces one that holds a connection's lock, and spins.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(work(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()


def with_powersgd(model: nn.Module, *, rank: int, first: int) -> DistributedDataParallel:
    """The model in DDP with torch's PowerSGD hook, which starts in step ``first``. It has one
    bucket: the hook starts collectives when others end, and gloo mixes up those of several."""
    replicated = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=first)
    replicated.register_comm_hook(state, powerSGD_hook)
    return replicated


def clip(parameters: Iterable[Any], limit: float) -> Tensor:
    """Scale the gradients of FSDP2's or DDP's parameters so that their norm is at most ``limit``;
    return the norm before, ``[]``. It uses local shards: in a small model they are faster than
    DTensors."""
    found = [p.grad for p in parameters if p.grad is not None]
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]
    square = torch.stack([g.square().sum() for g in grads]).sum()
    if isinstance(found[0], DTensor):
        # The shards partition the gradient, so its squared norm is the sum of theirs.
        dist.all_reduce(square)
    norm = square.sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return norm

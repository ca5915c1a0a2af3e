"""The small model sharded by FSDP1, its flat buffers and its training."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from support.small_net import loss_of, net

FSDP = FullyShardedDataParallel
CPU = torch.device("cpu")

# In the order of FSDP1's flat parameters: only what no inner unit has.
UNITS = {
    "": ("norm.weight", "norm.bias", "head.weight", "head.bias"),
    "first": ("first.0.weight", "first.0.bias"),
    "first.2": ("first.2.weight", "first.2.bias"),
    "second": ("second.0.weight", "second.0.bias", "second.2.weight", "second.2.bias"),
}


def nested(wrapped: Callable[[nn.Module], Any]) -> Any:
    """`Net` in nested units: a layer in a block in the root."""
    model: Any = net()
    model.first[2] = wrapped(model.first[2])
    model.first = wrapped(model.first)
    model.second = wrapped(model.second)
    return wrapped(model)


def sharded(**options: Any) -> Any:
    return nested(functools.partial(FSDP, device_id=CPU, **options))


def quietly(wrap: Callable[..., Any], *args: Any) -> Any:
    """Without the warning that units as small as these cost more compressed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*do not compress here")
        return wrap(*args)


def local_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """This rank's gradient shards; flat ones without ``use_orig_params``."""
    named = {clean(name): p.grad for name, p in model.named_parameters()}
    return {name: None if grad is None else grad.clone() for name, grad in named.items()}


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def train(model: Any, rank: int, steps: int, clip: float | None = None) -> list[Any]:
    """This rank's gradient shards, and norms, of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    history = []
    for step in range(steps):
        loss_of(model, rank, step).backward()
        norm = None if clip is None else model.clip_grad_norm_(clip)
        history.append((norm, local_grads(model)))
        optimizer.step()
        optimizer.zero_grad()
    return history


def flat_of(
    unit: str, tensors: dict[str, Tensor], world_size: int, use_orig_params: bool
) -> tuple[Tensor, list[str]]:
    """FSDP1's buffer ``[W * S]`` of these tensors, and the owner of each element."""
    parts: list[Tensor] = []
    owners: list[str] = []

    def pad(multiple: int) -> None:
        missing = -len(owners) % multiple
        parts.append(torch.zeros(missing))
        owners.extend([""] * missing)

    for name in UNITS[unit]:
        if use_orig_params:
            pad(4)  # 16 bytes
        parts.append(tensors[name].flatten())
        owners.extend([name] * tensors[name].numel())
    pad(world_size)
    return torch.cat(parts), owners

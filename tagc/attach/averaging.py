"""Replaces FSDP's all-reduce over replicas: a tensor subclass averages itself.

FSDP2 on a mesh with a replicated dimension calls ``torch.distributed.all_reduce`` on the tensor
that its reduce-scatter allocated. Like torch's functions, ``all_reduce`` first asks the class of
its tensor (``__torch_function__``), so a subclass can replace it. Every other operation of FSDP on
the tensor returns plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect import ReplicaAverage


class _Averaging(Tensor):
    """A tensor with its own all-reduce, ``tagc_average``."""

    tagc_average: Callable[[Tensor, Any], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is dist.all_reduce:
                return _average(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _average(
    tensor: _Averaging, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    tensor.tagc_average(plain(tensor), op)


def averaging(buffer: Tensor, average: ReplicaAverage | Callable[[Tensor, Any], None]) -> Tensor:
    """``buffer`` as a tensor on which ``torch.distributed.all_reduce`` calls
    ``average(buffer, op)`` for any group, and is done when that returns."""
    found = buffer.as_subclass(_Averaging)
    found.tagc_average = average
    return found


def plain(buffer: Tensor) -> Tensor:
    """The same memory as a plain ``Tensor``."""
    return buffer.as_subclass(Tensor) if isinstance(buffer, _Averaging) else buffer


@cache
def all_reduces_by_class() -> bool:
    """Whether this torch's ``all_reduce`` asks the class of its tensor. Sends nothing."""
    asked: list[Any] = []
    probe = averaging(
        torch.empty(0, dtype=torch.float32, device="cpu"), lambda _, op: asked.append(op)
    )
    # With a group that this rank is not in, it does nothing if it does not ask.
    dist.all_reduce(probe, group=dist.GroupMember.NON_GROUP_MEMBER)
    return bool(asked)

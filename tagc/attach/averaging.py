"""Gradients that average themselves over replicas, where FSDP would all-reduce them.

FSDP2 on a mesh with a replicated dimension calls ``torch.distributed.all_reduce`` on the tensor
that its reduce-scatter allocated. That function asks the class of its tensor first, by
``__torch_function__``, as torch's functions do: so the tensor can be of a class that does something
else. Everything else that FSDP does with it gives plain tensors.
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
    """A tensor with an all-reduce of its own, ``tagc_average``."""

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
    """``buffer``, on which ``torch.distributed.all_reduce`` is ``average(buffer, op)``, whatever
    its group; it is done when that returns."""
    found = buffer.as_subclass(_Averaging)
    found.tagc_average = average
    return found


def plain(buffer: Tensor) -> Tensor:
    """The same memory, as a tensor of no class of its own."""
    return buffer.as_subclass(Tensor) if isinstance(buffer, _Averaging) else buffer


@cache
def all_reduces_by_class() -> bool:
    """Whether this torch's ``all_reduce`` asks the class of its tensor. Nothing is sent."""
    asked: list[Any] = []
    probe = averaging(
        torch.empty(0, dtype=torch.float32, device="cpu"), lambda _, op: asked.append(op)
    )
    # Of a group that this rank is not in, so that it does nothing if it does not ask.
    dist.all_reduce(probe, group=dist.GroupMember.NON_GROUP_MEMBER)
    return bool(asked)

"""What a step starts, recorded as a CUDA graph would, on a CPU.

A tape has every operation of torch's and every operator of tagc's with its tensors, and every
collective, but no line of Python between them. Playing it runs them again at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from support.distributed import as_on_nccl
from tagc.collect.replay import Store
from tagc.ops import get_ops

_WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select"}


class Tape(TorchDispatchMode):
    """Records inside ``with``, as a stream that is being captured."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __enter__(self) -> Any:
        self._capturing = patch.object(Store, "capturing", True)
        self._capturing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._capturing.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._opname
        assert name not in _WAITS, f"a capture would fail: the host waits for {name}"
        out = func(*args, **kwargs or {})
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        # Views, and results in given memory, are where they were.
        made = [t for t in _tensors(out) if t.untyped_storage()._cdata not in given]
        computes = func.namespace != "aten" or made or func._schema.is_mutable
        if computes and func.namespace != "profiler":
            self._calls.append((func, args, kwargs or {}, made))
        return out

    def launch(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run one of tagc's operators, which are kernels on a GPU."""
        with _disable_current_modes():
            operator(*args, **kwargs)
        self._calls.append((operator, args, kwargs, []))

    def play(self) -> None:
        """Run all of it again."""
        with torch.no_grad():
            for function, args, kwargs, made in self._calls:
                out = function(*args, **kwargs)
                for old, new in zip(made, _tensors(out) if made else (), strict=True):
                    if old is not new:
                        old.copy_(new)
                if getattr(function, "namespace", "") == "c10d":
                    for leaf in tree_leaves(out):
                        if not isinstance(leaf, Tensor):
                            leaf.wait()


class _Taped:
    """Operators that a tape records."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._ops, name)
        if not callable(operator):
            return operator

        def run(*args: Any, **kwargs: Any) -> Any:
            modes = _get_current_dispatch_mode_stack()
            tapes = [mode for mode in modes if isinstance(mode, Tape)]
            if not tapes:
                return operator(*args, **kwargs)
            return tapes[0].launch(operator, args, kwargs)

        return run


@contextmanager
def tapes() -> Iterator[None]:
    """Inside, models are wrapped as on NCCL, with operators that tapes record, and FSDP keeps its
    buffers where they are. Messages of exact changes take the eager operators long."""

    def taped(device: Any, name: str | None = None) -> Any:
        return _Taped(get_ops(device, "cpu"))

    def reduce_scatter(out: Tensor, inp: Tensor, *, group: Any, op: Any = None) -> None:
        # gloo's own copies the result from memory that no operation of torch's made.
        received = torch.empty_like(inp)
        dist.all_to_all_single(received, inp, group=group)
        torch.sum(received.view(group.size(), *out.shape), 0, out=out)
        if op == dist.ReduceOp.AVG:
            out.div_(group.size())

    with (
        as_on_nccl(),
        patch("tagc.collect.transport.reduce_scatter", reduce_scatter),
        patch("tagc.handle.collectives.get_ops", taped),
        patch.object(_fsdp_param, "free_storage", lambda tensor: None),
    ):
        yield


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

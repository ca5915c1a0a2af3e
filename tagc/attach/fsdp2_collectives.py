"""FSDP2: the collectives that its parameter groups call in place of FSDP's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from tagc.attach.unit import Unit
from tagc.collect import Lockstep, Phase, Transport, UnitGatherer, UnitReducer


class CustomReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Reduces a unit's gradients. It also allocates the tensors that FSDP all-reduces, so that they
    can average themselves.

    Attributes:
        average: the average over replicas that replaces FSDP's all-reduce; None without replicas.
        reached: see :attr:`Unit.reached`.
    """

    def __init__(
        self, reducer: UnitReducer, names: Mapping[int, str], planned: frozenset[str]
    ) -> None:
        """``names``: of FSDP's parameters, by their ids; ``planned``: of those in the plan."""
        self._reduce, self._names, self._planned = reducer.reduce, names, planned
        self.average: Callable[[Tensor, Any], None] | None = None
        self.reached: frozenset[str] | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        params = _params_of(sys._getframe(1))
        if params is not None:
            reached = frozenset(self._names[id(param)] for param in params)
            self.reached = None if reached == self._planned else reached
        buffer = super().allocate(size, dtype=dtype, device=device)
        return buffer if self.average is None else _averaging(buffer, self.average)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if self.average is not None:
            output_tensor, input_tensor = _plain(output_tensor), _plain(input_tensor)
        self._reduce(output_tensor, input_tensor, group, op, reached=self.reached)


def _params_of(foreach_reduce: FrameType) -> Sequence[Any] | None:
    """The parameters whose gradients FSDP is about to reduce, read from the frame of its function,
    because FSDP tells its collectives only sizes. None if a later FSDP has no such list."""
    return foreach_reduce.f_locals.get("fsdp_params")


class _Averaging(Tensor):
    """A tensor with its own all-reduce, ``tagc_average``.

    FSDP2 on a mesh with a replicated dimension calls ``torch.distributed.all_reduce`` on the tensor
    that its reduce-scatter allocated. Like torch's functions, ``all_reduce`` first asks the class
    of its tensor (``__torch_function__``), so a subclass can replace it. Every other operation of
    FSDP on the tensor returns plain tensors.
    """

    tagc_average: Callable[[Tensor, Any], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is dist.all_reduce:
                # torch names all arguments but the tensor.
                (tensor,) = args
                return tensor.tagc_average(_plain(tensor), kwargs["op"])
            return func(*args, **kwargs)


def _averaging(buffer: Tensor, average: Callable[[Tensor, Any], None]) -> Tensor:
    """``buffer`` as a tensor on which ``torch.distributed.all_reduce`` calls
    ``average(buffer, op)`` for any group, and is done when that returns."""
    found = buffer.as_subclass(_Averaging)
    found.tagc_average = average
    return found


def _plain(buffer: Tensor) -> Tensor:
    """The same memory as a plain ``Tensor``."""
    return buffer.as_subclass(Tensor) if isinstance(buffer, _Averaging) else buffer


@cache
def all_reduces_by_class() -> bool:
    """Whether this torch's ``all_reduce`` asks the class of its tensor. Sends nothing."""
    asked: list[Any] = []
    probe = _averaging(
        torch.empty(0, dtype=torch.float32, device="cpu"), lambda _, op: asked.append(op)
    )
    # With a group that this rank is not in, it does nothing if it does not ask.
    dist.all_reduce(probe, group=dist.GroupMember.NON_GROUP_MEMBER)
    return bool(asked)


class CheckedAllGather(AllGather):
    """FSDP's own all-gather, after a check that all ranks are at the same one. Without the check it
    would accept any message that arrives, and hide a mix-up from the other collectives. Only for
    groups whose ranks exchange headers; see :class:`Lockstep`."""

    def __init__(self, native: AllGather, unit: Unit) -> None:
        self._native = native
        self._lockstep = Lockstep("parameters", unit.info.label, unit.device)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self._native.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._lockstep.check(Transport(group), 0)
        return self._native(output_tensor, input_tensor, group, async_op)


class GradMode:
    """Whether autograd records the running forward. FSDP itself always gathers under ``no_grad``.

    All units of a model share one object, because another unit's forward may begin a unit's gather
    (prefetching).
    """

    enabled = True


class CustomAllGather(DefaultAllocMixin, AllGather):
    """Gathers a unit's parameters."""

    def __init__(self, gatherer: UnitGatherer, param_group: Any, grad_mode: GradMode) -> None:
        self._gather, self._param_group = gatherer.gather, param_group
        self._grad_mode, self._note_forward = grad_mode, gatherer.note_forward

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the unit's modules."""
        self._grad_mode.enabled = torch.is_grad_enabled()
        if self._grad_mode.enabled:
            self._note_forward()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        phase = self._phase()
        if not async_op:  # FSDP calls this on the stream that is to run it
            self._gather(output_tensor, input_tensor, group, phase)
            return None
        return self._start(output_tensor, input_tensor, group, phase)

    @torch.no_grad()
    def send_ahead(self, out: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Gather where FSDP does not; the current stream waits for it."""
        work = self._start(out, shard, group, Phase.AHEAD)
        if work is not None:
            work.wait()

    def _start(
        self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase
    ) -> dist.Work | None:
        context = self._param_group.comm_ctx
        stream = getattr(context, "all_gather_stream", None)
        if stream is None:  # before the first forward of FSDP's root
            self._gather(out, inp, group, phase)
            return None
        streams = context.device_handle
        stream.wait_stream(streams.current_stream())
        with streams.stream(stream):
            self._gather(out, inp, group, phase)
            return _Gathered(stream.record_event(), streams)

    def _phase(self) -> Phase:
        # The state is the same on every rank, even for prefetched units.
        state = self._param_group._training_state
        if state is TrainingState.PRE_BACKWARD:
            return Phase.BACKWARD
        recorded = state is TrainingState.FORWARD and self._grad_mode.enabled
        return Phase.FORWARD if recorded else Phase.OTHER


class _Gathered(dist.Work):
    """An all-gather on FSDP's all-gather stream. FSDP waits for it before it uses or frees what it
    writes."""

    def __init__(self, done: Any, streams: Any) -> None:
        super().__init__()
        self._done, self._streams = done, streams

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._streams.current_stream().wait_event(self._done)
        return True

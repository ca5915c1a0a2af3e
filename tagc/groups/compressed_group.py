"""A process group that compresses what passes through it.

Large floating tensors are coded by all-reduces and reduce-scatters (sums and averages), all-gathers
and all-to-alls of a forward or a backward (:mod:`tagc.groups.forward`), and by sends and receives.
Everything else goes to the inner group, which torch's own backends serve: integers, small tensors,
other reductions, other dtypes, and collectives that are not listed here. So does what asks for the
backend itself: FSDP2's own collectives (:func:`tagc.wrap` replaces them), and symmetric memory.

The only file that knows the methods of ``torch.distributed.ProcessGroup``, batches of messages
aside (:mod:`tagc.groups.works`). torch calls the same collective by several names, and renamed
some in 2.13.
"""

# torch's stubs name arguments otherwise, and lack a constructor.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.basics.switch import is_disabled
from tagc.codecs.rows import Coder, ExponentCoder, RowCoder
from tagc.collect.transport import MARKS, CollectiveWork, Transport, failing_in
from tagc.groups.activations import CodedCollectives
from tagc.groups.forward import in_backward, in_forward, in_recomputation
from tagc.groups.works import Batches, CodedWork, several
from tagc.ops import get_ops
from tagc.policy.rules import DimensionRule, ExactActivationsConfig

BACKEND = "tagc"
"""The backend's name for torch."""


class _Inner(Transport):
    """The transport of an inner group, which torch's functions for two ranks do not know.

    A message meets a receive of its own size only: gloo would end the process, or fill a part. The
    size is that of the room for the message, of which less may be used.
    """

    def send(self, t: Tensor, rank: int, tag: int, used: int | None = None) -> Any:
        return self.group.send([t[:used]], rank, tag ^ (t.numel() & MARKS))

    def receive(self, t: Tensor, rank: int, tag: int) -> Any:
        return self.group.recv([t], rank, tag ^ (t.numel() & MARKS))


def _as_inner(name: str) -> Any:
    """A method of :class:`CompressedGroup` that only calls the inner group's."""

    def method(self: CompressedGroup, *args: Any, **options: Any) -> Any:
        return getattr(self._inner, name)(*args, **options)

    return method


def _coalesced(name: str) -> Any:
    """A method that calls another one for several pairs of tensors, one after the other."""

    def method(self: CompressedGroup, outs: list[Tensor], inps: list[Tensor], opts: Any = None):
        one = getattr(self, name)
        return several([one(out, inp, opts) for out, inp in zip(outs, inps, strict=True)], outs)

    return method


class CompressedGroup(dist.ProcessGroup):
    """A process group whose large floating tensors travel as codes.

    Attributes:
        dimension: the mesh dimension's name.
        rule: how it is compressed.
        wire_bytes: bytes that this rank sent so far by the collectives above.
        dense_bytes: bytes that torch's own would have sent.
        captured_bytes: those of both that a replay of a CUDA graph sends.
    """

    def __init__(self, inner: dist.ProcessGroup, dimension: str, rule: DimensionRule) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner: Any = inner
        self._name = ""
        self._transport, self._batches = _Inner(inner), Batches(inner)
        self._collectives: dict[str, CodedCollectives] = {}
        self._flying: list[tuple[ref[CodedWork], CollectiveWork]] = []
        self._coder_type = ExponentCoder if rule.codec.kind == "exact" else RowCoder
        self.dimension, self.rule = dimension, rule
        self.wire_bytes = self.dense_bytes = 0
        self.captured_bytes = (0, 0)
        self._compresses = inner.size() > 1 and not is_disabled()
        self._had_forward = False
        GROUPS.add(self)

    @property
    def group_name(self) -> str:
        """The name that torch gave; until then a ValueError, as torch expects."""
        if not self._name:
            raise ValueError("the group has no name yet")
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self._inner._set_group_name(f"{name} inner")

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    # Reductions in place.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        opts = opts or dist.AllreduceOptions()
        divisor = self._divisor(opts.reduceOp)
        sent = 2 * (self.size() - 1) * tensor.numel() * tensor.element_size() // self.size()
        if divisor is None or not self._codes(tensor, tensor.numel() // self.size()):
            return self._native("allreduce", sent, tensors, opts)
        flat, on = _flat(tensor), self._on(tensor)
        what = self._named("all-reduce", tensor)
        return self._coded(what, lambda: on.all_reduce(flat, divisor), sent, [tensor], [flat])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """All-reduce tensors in place, one after the other."""
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp = opts.reduceOp
        return several([self.allreduce([t], plain) for t in tensors], tensors)

    # All-gathers.

    def _allgather_base(self, out: Tensor, inp: Tensor, opts: Any = None) -> Any:
        sent = (self.size() - 1) * inp.numel() * inp.element_size()
        if not _fits(out, inp, self.size()) or not self._codes(inp, inp.numel()):
            return self._native("_allgather_base", sent, out, inp, opts)
        return self._gather(_flat(out).view(self.size(), -1), inp, sent, [out])

    all_gather_single = _allgather_base

    allgather_into_tensor_coalesced = _coalesced("_allgather_base")
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outs: list[list[Tensor]], inps: list[Tensor], opts: Any = None) -> Any:
        """Gather every rank's tensor in a list of tensors, perhaps of different sizes."""
        (parts,), (inp,) = outs, inps
        sent = (self.size() - 1) * inp.numel() * inp.element_size()
        if not _alike(inp, parts, self.size()) or not self._codes(inp, inp.numel()):
            return self._native("allgather", sent, outs, inps, opts)
        return self._gather(inp.new_empty(self.size(), inp.numel()), inp, sent, parts)

    def _gather(self, whole: Tensor, inp: Tensor, sent: int, given: list[Tensor]) -> Any:
        """Gather in ``whole`` ``[W, n]``, which is one of the ``given`` tensors or all of them."""
        on, flat = self._on(inp), _flat(inp)
        made = [whole] if len(given) == 1 else list(whole)
        what = self._named("all-gather", inp)
        return self._coded(what, lambda: on.all_gather(whole, flat), sent, given, made)

    # Reduce-scatters.

    def _reduce_scatter_base(self, out: Tensor, inp: Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        divisor = self._divisor(opts.reduceOp)
        sent = (self.size() - 1) * out.numel() * out.element_size()
        fits = _fits(inp, out, self.size())
        if divisor is None or not fits or not self._codes(inp, out.numel()):
            return self._native("_reduce_scatter_base", sent, out, inp, opts)
        flat, rows, on = _flat(out), _flat(inp).view(self.size(), -1), self._on(inp)
        what = self._named("reduce-scatter", inp)
        return self._coded(
            what, lambda: on.reduce_scatter(flat, rows, divisor), sent, [out], [flat]
        )

    reduce_scatter_single = _reduce_scatter_base

    reduce_scatter_tensor_coalesced = _coalesced("_reduce_scatter_base")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outs: list[Tensor], inps: list[list[Tensor]], opts: Any = None) -> Any:
        """Add up the ranks' tensors for this rank, given as a list, perhaps of different sizes."""
        (out,), (parts,) = outs, inps
        opts = opts or dist.ReduceScatterOptions()
        alike = self._divisor(opts.reduceOp) is not None and _alike(out, parts, self.size())
        if alike and self._codes(out, out.numel()):
            return self._reduce_scatter_base(out, torch.stack(parts), opts)
        return self._native("reduce_scatter", self._to_others(parts), outs, inps, opts)

    # All-to-alls.

    def alltoall_base(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Send rank ``d`` the ``d``-th part of ``inp``, cut along the first dimension."""
        if not self._may_code(inp):
            sent = self._to_others(_parts(inp, in_splits, self.size()))
            splits = list(out_splits or ()), list(in_splits or ())
            return self._native("alltoall_base", sent, out, inp, *splits, opts)
        received = out.data.contiguous()
        arriving = _parts(received, out_splits, self.size())
        leaving = _parts(inp.detach().contiguous(), in_splits, self.size())
        return self._all_to_all(arriving, leaving, [out], [received])

    all_to_all_single = alltoall_base

    def alltoall(self, outs: list[Tensor], inps: list[Tensor], opts: Any = None) -> Any:
        if not all(self._may_code(t) for t in (*outs, *inps)):
            return self._native("alltoall", self._to_others(inps), outs, inps, opts)
        received = [_flat(t) for t in outs]
        return self._all_to_all(received, [_flat(t) for t in inps], outs, received)

    def _all_to_all(
        self, out: list[Tensor], inp: list[Tensor], given: list[Tensor], made: list[Tensor]
    ) -> Any:
        what, on = f"the all-to-all over dimension {self.dimension!r}", self._on(inp[0])
        sent = self._to_others(inp)
        return self._coded(what, lambda: on.all_to_all(out, inp), sent, given, made)

    # Messages between two ranks.

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        # It does not wait, because a pipeline's next stage may be sending as well.
        (t,) = tensors
        sent = t.numel() * t.element_size()
        if not self._codes_messages(t):
            with self._batches.message(t.device) as posted:
                return posted(self._native("send", sent, tensors, rank, tag))
        with self._batches.message(t.device) as posted:
            message = self._on(t).message_about(_flat(t))
            work = posted(self._inner.send([message], rank, tag))
        # The message lives as long as this work.
        pending = CodedWork(CollectiveWork([work], message.numel()), message.numel)
        what = self._named(f"send to rank {rank}", t)
        return self._batches.note(self._started(what, pending, sent, [t], [t]))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        (t,) = tensors
        if not self._codes_messages(t):
            with self._batches.message(t.device) as posted:
                return posted(self._inner.recv(tensors, rank, tag))
        with self._batches.message(t.device) as posted:
            flat, collectives = _flat(t), self._on(t)
            message = collectives.space_for(flat)
            work = posted(self._inner.recv([message], rank, tag))
        pending = CodedWork(
            CollectiveWork([work], 0), lambda: collectives.read(message, flat), [message]
        )
        what = self._named(f"receive from rank {rank}", t)
        return self._batches.note(self._started(what, pending, 0, [t], [flat]))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        (t,) = tensors
        if self._codes_messages(t):
            raise RuntimeError(
                f"tagc: dimension {self.dimension!r} compresses, and then a receive must name its "
                "source (src=...)"
            )
        return self._inner.recv_anysource(tensors, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batches.start(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._batches.end(device)

    # What is never coded. torch looks for these methods in Python. If it finds none, it calls its
    # own and holds Python's lock. A thread of gloo may wait for that lock to free a tensor, and
    # hold gloo's lock meanwhile: a deadlock.
    broadcast = _as_inner("broadcast")
    barrier = _as_inner("barrier")
    gather = _as_inner("gather")
    reduce = _as_inner("reduce")
    scatter = _as_inner("scatter")

    # What all of them share.

    def _native(self, name: str, sent: int, *args: Any) -> Any:
        """The inner group's own collective, which sends ``sent`` bytes. It takes no options that
        are None."""
        self._count(sent, sent)
        return getattr(self._inner, name)(*(arg for arg in args if arg is not None))

    def _to_others(self, parts: Sequence[Tensor]) -> int:
        """Bytes of a part for each rank, but for this rank's own."""
        own = self.rank()
        return sum(t.numel() * t.element_size() for rank, t in enumerate(parts) if rank != own)

    def _divisor(self, op: Any) -> int | None:
        """1 for sums, the number of ranks for averages, None for reductions that are not coded."""
        if op == dist.ReduceOp.SUM:
            return 1
        return self.size() if op == dist.ReduceOp.AVG else None

    def _may_code(self, t: Tensor) -> bool:
        may = self._compresses and self._is_coded(t) and self._carries_activations()
        if may and self._batches.is_open:
            raise RuntimeError(
                f"tagc: dimension {self.dimension!r} compresses, and codes no collectives between "
                "the start and the end of torch's coalescing; call them one by one"
            )
        return may

    def _carries_activations(self) -> bool:
        if in_forward():
            self._had_forward = True
            return True
        # What is recomputed gets the bits of its first forward, which was exact without a mark.
        return in_backward() and (self._had_forward or not in_recomputation())

    def _codes(self, t: Tensor, numel: int) -> bool:
        return self._may_code(t) and self._on(t).codes(t, numel)

    def _codes_messages(self, t: Tensor) -> bool:
        # Between two steps of a pipeline, no forward runs.
        return self._compresses and self._is_coded(t) and self._on(t).codes_messages(t)

    def _is_coded(self, t: Tensor) -> bool:
        """Whether it may be coded. torch hands over complex tensors as views of real elements."""
        if t.dtype not in self._coder_type.dtypes or t.layout != torch.strided:
            return False
        return t._base is None or not t._base.is_complex()

    def _on(self, t: Tensor) -> CodedCollectives:
        """The collectives for tensors on this device."""
        kind = t.device.type
        if kind not in self._collectives:
            codec, ops = self.rule.codec, get_ops(t.device)
            if isinstance(codec, ExactActivationsConfig):
                coder: Coder = ExponentCoder(ops)
            else:
                dithered = codec.rounding == "stochastic"
                coder = RowCoder(ops, bits=codec.bits, block=codec.block, dithered=dithered)
            self._collectives[kind] = CodedCollectives(self._transport, coder)
        return self._collectives[kind]

    def _named(self, kind: str, t: Tensor) -> str:
        return f"the {kind} of {list(t.shape)} over dimension {self.dimension!r}"

    def _coded(
        self,
        what: str,
        start: Callable[[], CodedWork],
        dense: int,
        given: list[Tensor],
        made: list[Tensor],
    ) -> dist.Work:
        """Start a coded collective. See :meth:`_started`."""
        with failing_in(what, self):
            # gloo ends a connection if the work of a message is dropped before it arrived. So the
            # works of collectives are kept, and those for which nobody can wait any more end now.
            for reference, work in self._flying:
                if reference() is None:
                    work.wait()
            pending = start()
        return self._started(what, pending, dense, given, made)

    def _count(self, wire: int, dense: int) -> None:
        self.wire_bytes += wire
        self.dense_bytes += dense
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            wire_before, dense_before = self.captured_bytes
            self.captured_bytes = (wire_before + wire, dense_before + dense)

    def _started(
        self, what: str, pending: CodedWork, dense: int, given: list[Tensor], made: list[Tensor]
    ) -> dist.Work:
        """The work for torch, which in the end copies ``made`` to the caller's ``given``; torch's
        own collective would have sent ``dense`` bytes."""
        self._count(pending.work.wire_bytes, dense)
        finish = pending.finish

        def finish_and_copy() -> None:
            finish()
            for theirs, ours in zip(given, made, strict=True):
                if theirs.data_ptr() != ours.data_ptr():
                    theirs.data.copy_(ours.view(theirs.shape))

        pending.finish = finish_and_copy
        pending.waits = self._transport.by_messages(given[0].device)
        self._flying = [flying for flying in self._flying if flying[1].works]
        self._flying.append((ref(pending), pending.work))
        pending.what, pending.group, pending.results = what, self, given
        return pending


def _fits(whole: Tensor, part: Tensor, size: int) -> bool:
    """Whether ``whole`` has room for every rank's ``part``. If not, torch's own group says so."""
    return whole.dtype == part.dtype and whole.numel() == size * part.numel()


def _alike(t: Tensor, parts: Sequence[Tensor], size: int) -> bool:
    """Whether ``parts`` are tensors like ``t``, one for each rank."""
    return len(parts) == size and all(p.shape == t.shape and p.dtype == t.dtype for p in parts)


def _flat(t: Tensor) -> Tensor:
    """The elements of ``t``, a view if they are contiguous. (A pipeline receives into tensors that
    require gradients.) As with torch's own collectives, autograd does not notice writes to it."""
    return t.data.contiguous().view(-1)


def _parts(t: Tensor, splits: Sequence[int] | None, size: int) -> list[Tensor]:
    """``t`` cut along its first dimension for each rank, flat."""
    sizes = list(splits) if splits else [t.shape[0] // size] * size
    if len(sizes) != size:
        raise ValueError(f"tagc: an all-to-all of {size} ranks needs {size} splits, not {sizes}")
    return [part.reshape(-1) for part in t.split(sizes)]


GROUPS: WeakSet[CompressedGroup] = WeakSet()
"""This process's groups that compress."""

"""What a compressing group has in flight, as torch knows it: coded collectives, and the messages
that a program posts in one batch.

Stages of a pipeline send to each other at once, by ``torch.distributed.batch_isend_irecv``. NCCL
runs the messages of one batch together. It runs messages that it gets one by one in order, so two
ranks that both begin with a send would wait for each other. Before 2.14 torch tells NCCL of a batch
only for groups of its own class; a group in Python finds the batch here. Since 2.14 torch tells
every group where a batch starts and ends, and drops the works of its messages.
"""

# torch's stubs lack constructors.
# pyright: reportCallIssue=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect.transport import CollectiveWork, failing_in

_BATCH = inspect.unwrap(dist.batch_isend_irecv).__code__


class CodedWork(dist.Work):
    """A collective whose messages (``work``) are decoded (``finish``) when it is waited for.

    Attributes:
        what, group: the collective's name for errors, and its group.
        results: the tensors that it writes.
        waits: whether nobody knows of the messages until they are waited for, as on gloo.
    """

    what = ""
    group: dist.ProcessGroup | None = None
    results: Sequence[Tensor] = ()
    waits = False

    def __init__(
        self, work: CollectiveWork, finish: Callable[[], object], arrived: Sequence[Tensor] = ()
    ) -> None:
        """``arrived`` is what ``finish`` reads."""
        super().__init__()
        self.work, self.finish, self._arrived = work, finish, arrived

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the messages, and decode them (on a GPU: on the current stream)."""
        # Several works in one have no name; each of them names itself.
        with nullcontext() if self.group is None else failing_in(self.what, self.group):
            self.work.wait()
            finish, self.finish = self.finish, lambda: None
            # It may be waited for after the inference mode that it started in.
            with torch.inference_mode():
                finish()
        for message in self._arrived:
            if message.is_cuda:  # it was made on the stream that started the collective
                message.record_stream(torch.cuda.current_stream(message.device))
        self._arrived = ()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether everything has arrived; then it is decoded. On gloo this waits."""
        return (self.waits or all(work.is_completed() for work in self.work.works)) and self.wait()

    def result(self) -> list[Tensor]:
        return list(self.results)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done, after waiting."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


def several(works: Sequence[dist.Work], result: Sequence[Tensor]) -> CodedWork:
    """One work for several."""
    found = CodedWork(CollectiveWork(works, 0), lambda: None)
    found.results = result
    return found


class Batches:
    """Starts messages of an inner group, those of a batch together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group
        self._open: _Batch | None = None

    @property
    def is_open(self) -> bool:
        """Whether torch is between :meth:`start` and :meth:`end`."""
        return self._open is not None and self._open.frame is None

    def start(self, device: torch.device) -> None:
        """Start a batch, for torch."""
        self._begin(_Batch(None), device)

    def end(self, device: torch.device) -> dist.Work:
        """Start all messages of the batch; the work waits for them, and decodes them."""
        batch = self._open
        if batch is None or batch.frame is not None:
            raise RuntimeError("tagc: a batch of messages ends that did not start")
        self._close(device)
        return several([*batch.coded, batch], [])

    @contextmanager
    def message(self, device: torch.device) -> Iterator[Callable[[Any], Any]]:
        """The start of one message. Yields a function that takes the message's work, and returns
        the work to wait for."""
        batch = self._open
        if not self._group._get_backend(device).supports_coalescing:
            yield lambda work: work
            return
        if not self.is_open:
            frame = batch_of(inspect.currentframe())
            if frame is None:
                yield lambda work: work
                return
            if batch is None or batch.frame is not frame:
                batch = _Batch(frame)
                posted = frame.f_locals["p2p_op_list"]
                batch.left = sum(one.tensor.device.type == device.type for one in posted)
                self._begin(batch, device)
        try:
            yield lambda work: batch
        except BaseException:
            self._close(device)
            raise
        assert batch is not None
        batch.left -= 1
        if batch.left == 0:
            self._close(device)

    def note(self, coded: dist.Work) -> dist.Work:
        """Let the batch's own work wait for this one, too, as torch drops it."""
        if self.is_open:
            assert self._open is not None
            self._open.coded.append(coded)
        return coded

    def _begin(self, batch: _Batch, device: torch.device) -> None:
        self._close(device)  # an error ended the batch before
        self._open = batch
        self._group._start_coalescing(device)

    def _close(self, device: torch.device) -> None:
        batch, self._open = self._open, None
        if batch is not None:
            batch.frame = None  # whose variables are the works: a cycle that would keep all tensors
            batch.work = self._group._end_coalescing(device)


class _Batch(dist.Work):
    """The messages of one batch in flight; ``frame`` is that of torch's function, None if torch
    itself ends the batch."""

    def __init__(self, frame: Any) -> None:
        super().__init__()
        self.frame = frame
        self.left = 0  # messages that are still to come; negative if torch ends the batch
        self.coded: list[dist.Work] = []  # works that torch drops
        self.work: Any = None  # the inner group's, once all messages have started

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self.work.wait()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


def batch_of(frame: Any) -> Any:
    """The frame of torch's function that posts this message with others; None if there is none."""
    while frame is not None and frame.f_code is not _BATCH:
        frame = frame.f_back
    if frame is not None and "p2p_op_list" not in frame.f_locals:
        raise RuntimeError(
            "tagc does not know this torch's batch_isend_irecv, and a message by itself may wait "
            "forever: leave this dimension out of the policy, and tell us"
        )
    return frame

"""Messages between two ranks that a program posts in one batch.

Stages of a pipeline send to each other at once, by ``torch.distributed.batch_isend_irecv``. NCCL
runs the messages of one batch together. It runs messages that it gets one by one in order, so two
ranks that both begin with a send would wait for each other. torch gives NCCL the batch only for
groups of its own class; a group in Python gets every message by itself, and finds the batch here.
"""

# torch's stubs lack a constructor.
# pyright: reportCallIssue=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_FRAMES = 8
"""At most as many calls lie between torch's function and the group."""


class Batches:
    """Starts messages of an inner group, those of a batch together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group
        self._open: _Batch | None = None

    def post(self, start: Callable[[], dist.Work], device: torch.device) -> Any:
        """Start a message with ``start``, at the latest when its batch is complete.

        Returns:
            The work to wait for, once the batch is complete.
        """
        if not self._group._get_backend(device).supports_coalescing:
            return start()
        messages = posted_with(inspect.currentframe())
        if messages is None:
            return start()
        if self._open is None or self._open.messages is not messages:
            self._close(device)  # an error ended the batch before
            self._open = _Batch(messages)
            self._group._start_coalescing(device)
        batch = self._open
        try:
            start()
        except BaseException:
            self._close(device)
            raise
        batch.left -= 1
        if not batch.left:
            self._close(device)
        return batch

    def _close(self, device: torch.device) -> None:
        batch, self._open = self._open, None
        if batch is not None:
            batch.work = self._group._end_coalescing(device)


class _Batch(dist.Work):
    """The messages of one batch in flight."""

    def __init__(self, messages: Sequence[Any]) -> None:
        super().__init__()
        self.messages, self.left = messages, len(messages)
        self.work: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self.work.wait()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


def posted_with(frame: Any) -> Sequence[Any] | None:
    """The messages that torch posts in the same batch, read from the frame of its function; None if
    it posts one by itself.

    Raises:
        RuntimeError: if this torch's function has no such list.
    """
    code = dist.batch_isend_irecv.__code__
    for _ in range(_FRAMES):
        frame = frame and frame.f_back
        if frame is not None and frame.f_code is code:
            if "p2p_op_list" not in frame.f_locals:
                raise RuntimeError(
                    "tagc does not know this torch's batch_isend_irecv, and a message by itself "
                    "may wait forever: leave this dimension out of the policy, and tell us"
                )
            return frame.f_locals["p2p_op_list"]
    return None

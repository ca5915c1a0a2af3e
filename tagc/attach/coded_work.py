"""A coded collective in flight, as torch knows one."""

# torch's stubs lack constructors.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect.activations import Pending
from tagc.collect.transport import CollectiveWork, failing_in


class CodedWork(dist.Work):
    """A collective that is decoded when it is waited for.

    Args:
        what: the collective, for errors.
        result: the tensors that it writes.
    """

    def __init__(
        self, group: dist.ProcessGroup, what: str, pending: Pending, result: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._group, self._what = group, what
        self._pending, self._result = pending, list(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the messages, and decode them."""
        with failing_in(self._what, self._group):
            self._pending.wait()
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether everything has arrived; then it is decoded."""
        if not all(work.is_completed() for work in self._pending.work.works):
            return False
        return self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that the collective writes."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done, after waiting."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


class SeveralWorks(CodedWork):
    """One work for several, each of which names itself in errors."""

    def __init__(self, works: Sequence[dist.Work], result: Sequence[Tensor]) -> None:
        dist.Work.__init__(self)
        self._pending = Pending(CollectiveWork(works, 0), lambda: None)
        self._result = list(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        self._pending.wait()
        return True

"""torchft: the one file that knows its ``Manager``, which says what sites there are.

torchft's lighthouse is a server that knows which sites live. Each rank of a site has a ``Manager``
that asks it for a *quorum*: the sites that take part from now on. The manager connects the rank to
its counterparts by a new process group. A site that is behind gets the state of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# An attribute of the manager, which cannot forget what it serves.
_ATTRIBUTE = "_tagc_sites"


class SitesLostError(RuntimeError):
    """This site cannot reach the others."""


def is_manager(found: object) -> bool:
    """Whether this is a ``torchft.Manager``."""
    return hasattr(found, "start_quorum") and hasattr(found, "should_commit")


class TorchftSites:
    """The sites of a ``torchft.Manager`` (written for torchft 0.2)."""

    def __init__(self, manager: Any) -> None:
        """Take a manager that does nothing else.

        Raises:
            ValueError: if it does not wait for a quorum, or its process group has other sites
                than this site's counterparts.
        """
        if manager._use_async_quorum:
            raise ValueError(
                "tagc.sites waits for a quorum before every exchange: make the torchft.Manager "
                "with use_async_quorum=False"
            )
        if not hasattr(type(manager._pg), "parent"):
            raise ValueError(
                f"the torchft.Manager has process group {type(manager._pg).__name__}, which runs "
                "in another process or sends nothing: give it torchft.ProcessGroupGloo(timeout=...)"
            )
        self._manager = manager

    def serve(
        self, send: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """See :meth:`tagc.handle.elastic_exchange.Membership.serve`."""
        manager = self._manager
        served = getattr(manager, _ATTRIBUTE, None)
        if served is None:
            served = {}
            setattr(manager, _ATTRIBUTE, served)
            manager.register_state_dict_fn(
                "tagc", lambda state: served["load"](state), lambda: served["send"]()
            )
        served.update(send=send, load=load)

    def meet(self) -> dist.ProcessGroup | None:
        """See :meth:`tagc.handle.elastic_exchange.Membership.meet`."""
        manager = self._manager
        try:
            manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            raise SitesLostError(
                f"tagc.sites: there is no quorum of sites: {error}. Check that torchft's "
                "lighthouse runs, that this site reaches it, and that enough sites live; then "
                "start this site again: it continues from the others"
            ) from error
        return None if manager.errored() else manager._pg.parent

    def commit(self, error: Exception | None) -> bool:
        """See :meth:`tagc.handle.elastic_exchange.Membership.commit`."""
        if error is not None:
            self._manager.report_error(error)
        return self._manager.should_commit()

    def fall_behind(self, count: int = 0) -> None:
        """See :meth:`tagc.handle.elastic_exchange.Membership.fall_behind`."""
        self._manager.load_state_dict({"step": count, "batches_committed": 0})

    @property
    def count(self) -> int:
        """See :attr:`tagc.handle.elastic_exchange.Membership.count`."""
        return self._manager.current_step()

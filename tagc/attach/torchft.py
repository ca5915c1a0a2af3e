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
    """The sites of a ``torchft.Manager`` (written for torchft 0.2). All ranks of a site call its
    methods together."""

    def __init__(self, manager: Any) -> None:
        """Take a manager that does nothing else.

        Raises:
            ValueError: if it does not wait for a quorum, asks for one only once, lets sites begin
                with different parameters, or its process group is not ``torchft.ProcessGroupGloo``.
        """
        if manager._use_async_quorum:
            raise ValueError(
                "tagc.sites waits for a quorum before every exchange: make the torchft.Manager "
                "with use_async_quorum=False"
            )
        if not manager._init_sync:
            raise ValueError(
                "sites begin from one of them: make the torchft.Manager with init_sync=True"
            )
        if manager._quorum_retries < 1:
            raise ValueError(
                "the torchft.Manager asks its lighthouse only once, so a lighthouse that is away "
                "for a second would end all sites: make it with quorum_retries=100, or set "
                "TORCHFT_QUORUM_RETRIES=100"
            )
        name = manager._pg.getBackendName()
        if name != "torchft-gloo":
            raise ValueError(
                f"the torchft.Manager has a process group of backend {name!r}: give it "
                "torchft.ProcessGroupGloo(timeout=...)"
            )
        self._manager = manager

    def serve(
        self, send: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """Say what a site that is behind gets from this one, and how this one loads it."""
        manager = self._manager
        if not hasattr(manager, _ATTRIBUTE):
            manager.register_state_dict_fn(
                "tagc",
                lambda state: getattr(manager, _ATTRIBUTE)["load"](state),
                lambda: getattr(manager, _ATTRIBUTE)["send"](),
            )
        setattr(manager, _ATTRIBUTE, {"send": send, "load": load})

    def forget(self) -> None:
        """Serve nothing any more."""
        setattr(self._manager, _ATTRIBUTE, {})

    def meet(self) -> dist.ProcessGroup | None:
        """Wait for the other sites. If this site is behind, load what another one sends.

        Returns:
            This rank's counterparts in the sites that are there; another group object whenever the
            sites are not those of the last meeting, or an exchange failed since then. None if they
            could not connect.

        Raises:
            SitesLostError: if there are no other sites in time.
            Exception: what loading the other site's state raised.
        """
        manager = self._manager
        try:
            manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            if manager._healing:
                raise
            raise SitesLostError(
                f"tagc.sites: there is no quorum of sites: {error}. Check that torchft's "
                "lighthouse runs, that this site reaches it, and that enough sites live; then "
                "start this site again: it continues from the others"
            ) from error
        return None if manager.errored() else manager._pg.parent

    def commit(self, error: Exception | None) -> bool:
        """Whether the exchange counts: no rank of this site has an error.

        Raises:
            SitesLostError: if too many attempts failed, or a site that loads this one's state did
                not end in time.
        """
        if error is not None:
            self._manager.report_error(error)
        try:
            return self._manager.should_commit()
        except (RuntimeError, TimeoutError) as failure:
            why = "" if error is None else f" The last attempt failed: {error}"
            raise SitesLostError(
                f"tagc.sites: an exchange does not count: {failure}.{why} If another site loaded "
                "this one's state, give the Manager and its group a timeout that is longer than "
                "that takes. Start this site again: it continues from the others"
            ) from (error or failure)

    def rewind(self, count: int = 0) -> None:
        """Count ``count`` exchanges from now on. At the next meeting this site continues from one
        that counts more."""
        self._manager.load_state_dict({"step": count, "batches_committed": 0})

    @property
    def count(self) -> int:
        """Exchanges of this site that count."""
        return self._manager.current_step()

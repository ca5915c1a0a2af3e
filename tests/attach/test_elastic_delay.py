"""Sites that come and go, with a delay: an exchange fails while training goes on."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from support.distributed import on_ranks
from support.elastic import Round
from support.elastic_site import DELAYED, ElasticSite, check_accounts, joined
from support.exact import equal
from support.site_net import train

BOTH = Round((0, 1))


def clock(site: ElasticSite) -> list[int]:
    """Steps, and when averages in flight are applied, as saved."""
    (found,) = (t for k, t in site.handle.state_dict().items() if k.endswith("sites.steps"))
    return found.tolist()


@on_ranks(2)
def test_what_failed_in_flight_is_not_saved(rank: int, world_size: int) -> None:
    """And is tried again when its averages would be applied."""
    site = joined(rank, world_size, DELAYED, script=[BOTH, *[Round((0, 1), failed=1)], BOTH])
    train(site.model, site.optimizer, rank, range(4))
    sent = site.handle.metrics().wire_bytes
    assert sent > 0
    assert clock(site) == [4, -1, -1]
    for now, before in zip(site.exchange._reducers.owed(), site.exchange._owed, strict=True):
        equal(now.residuals, before.residuals)
    train(site.model, site.optimizer, rank, range(4, 5))
    metrics = site.handle.metrics()
    assert (metrics.exchanges, metrics.failed, metrics.waited) == (1, 1, 1)
    assert metrics.wire_bytes == 2 * sent
    check_accounts(site)


@on_ranks(2)
def test_what_is_in_doubt_is_saved_as_in_flight(rank: int, world_size: int) -> None:
    """As the site that counts it saves it."""
    site = joined(rank, world_size, DELAYED, script=[BOTH, Round((0, 1), doubts=(1,)), BOTH])
    train(site.model, site.optimizer, rank, range(4))
    assert clock(site) == [4, 5, -1]
    assert site.handle.sites == 2


@on_ranks(2)
def test_a_join_that_fails_costs_others_nothing(rank: int, world_size: int) -> None:
    """The site that joins tries again at once, the other one after its delay."""
    site = joined(
        rank, world_size, DELAYED, script=[BOTH, BOTH, Round((0, 1), failed=2, died=(0,)), BOTH]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tagc.sites: an exchange did not count")
        site.run()
    assert site.handle.metrics().healed == (rank == 1) + (rank == 0)
    check_accounts(site)


@on_ranks(4)
def test_no_rank_trains_on_while_another_waits(rank: int, world_size: int) -> None:
    """One rank of a site gets no group: its neighbour would wait in FSDP for it."""
    site = ElasticSite(
        rank, world_size, [BOTH, Round((0, 1), failed=1), BOTH, BOTH], DELAYED, "FSDP2"
    )
    site.start()
    meet = site.exchange._members.meet
    met: list[Any] = []

    def meets() -> dist.ProcessGroup | None:
        met.append(meet())
        return None if rank == 2 and len(met) == 1 else met[-1]

    with patch.object(site.exchange._members, "meet", meets):
        train(site.model, site.optimizer, site.site, range(8))
    metrics = site.handle.metrics()
    assert (metrics.exchanges, metrics.failed) == (2, 1)


@on_ranks(2)
def test_the_last_exchange_is_one(rank: int, world_size: int) -> None:
    """Also of a site that another one has healed into it."""
    script = [BOTH, Round((0, 1), doubts=(1,)), BOTH]
    site = joined(rank, world_size, DELAYED, script=script)
    train(site.model, site.optimizer, rank, range(4))
    site.handle.exchange()
    assert site.manager.now == len(script)
    check_accounts(site)

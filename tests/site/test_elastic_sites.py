"""Sites that die, miss exchanges, doubt them and return: nothing is lost, and all agree."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from support.distributed import fails, on_ranks
from support.elastic import Round
from support.elastic_site import DELAYED, POLICY, ElasticSite, check_accounts, joined
from support.exact import equal
from support.marks import slow
from support.site_net import DENSE, FOUR_BITS, in_sites, policy, train
from support.small_net import local_weights
from support.units import gathered

LEAD = FOUR_BITS | {"feedback": {"kind": "residual", "lead": 0.5}}


def random_script(seed: int, sites: int, rounds: int) -> list[Round]:
    """All sites are there in the first round and the last. After an exchange that some doubt, a
    site that counts it is there: otherwise nobody can tell the others."""
    draw = random.Random(seed)
    everyone = tuple(range(sites))
    script = [Round(everyone)]
    for _ in range(rounds):
        before = script[-1]
        there = {i for i in everyone if draw.random() < 0.8}
        there = set(before.sites) if draw.random() < 0.4 else there
        counts = [i for i in before.sites if i not in before.doubts] or before.sites
        knows = draw.choice(counts)
        sites_now = tuple(sorted(there | {knows}))
        script.append(
            Round(
                sites_now,
                failed=draw.choice((0, 0, 0, 1, 2)),
                doubts=tuple(i for i in sites_now if draw.random() < 0.15),
                died=tuple(i for i in sites_now if i != knows and draw.random() < 0.1),
            )
        )
    return [*script, Round(everyone), Round(everyone)]


@on_ranks(4)
@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 20))])
@pytest.mark.parametrize("rules", [POLICY, DELAYED], ids=["waiting", "delayed"])
def test_faults_at_random(rank: int, world_size: int, rules: Any, seed: int) -> None:
    script = random_script(seed, world_size, 6)
    site = ElasticSite(rank, world_size, script, rules)
    site.run()
    check_accounts(site)


@on_ranks(4)
def test_ranks_of_a_site_count_together(rank: int, world_size: int) -> None:
    """An answer that one rank lacks is in doubt for all ranks of its site."""
    script = [
        Round((0, 1)),
        Round((0, 1), failed=1, doubts=(1,)),
        Round((0, 1)),
        Round((0,)),
        Round((0, 1), doubts=(0, 1)),
        Round((0, 1)),
    ]
    site = ElasticSite(rank, world_size, script, POLICY, "FSDP2")
    site.run()
    check_accounts(site)
    metrics = site.handle.metrics()
    # The site in doubt, and the one that was away, continued from the other.
    assert metrics.healed == (2 if site.site else 0) + (site.site == 1)
    assert "attempts failed" in str(metrics)


@on_ranks(3)
def test_a_doubt_stays_until_it_is_known(rank: int, world_size: int) -> None:
    """The site that counts the exchange misses a meeting, at which the others count nothing."""
    script = [
        Round((0, 1, 2)),
        Round((0, 1, 2), doubts=(1, 2)),
        Round((1, 2), doubts=(1, 2)),
        Round((0, 1, 2)),
    ]
    site = ElasticSite(rank, world_size, script, POLICY)
    site.run()
    check_accounts(site)


@on_ranks(2)
def test_too_many_attempts_are_an_error_that_names_the_last(rank: int, world_size: int) -> None:
    """What the site owes is what it owed before."""
    site = joined(rank, world_size)
    train(site.model, site.optimizer, rank, range(3))
    owed = site.owed()
    with (
        patch.object(site.exchange, "_wait", side_effect=RuntimeError("the link is down")),
        patch.object(site.manager, "should_commit", side_effect=RuntimeError("failed 11 times")),
    ):
        kind, text = fails(lambda: train(site.model, site.optimizer, rank, range(3, 4)))
    assert kind == "SitesLostError"
    assert "failed 11 times. The last attempt failed: the link is down" in text
    assert len(site.exchange._doubts) == 1
    equal(dict(enumerate(site.owed())), dict(enumerate(owed)))  # type: ignore[arg-type]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "rules"),
    [
        (2, policy(FOUR_BITS, every=2, together=1)),
        (2, DELAYED),
        # Of owners that owe nothing that they would hand on.
        (3, DELAYED | {"gradients": [DENSE]}),
    ],
    ids=["4 bits", "delayed", "dense"],
)
def test_without_faults_sites_are_those_of_a_group(
    rank: int, world_size: int, rules: dict[str, Any]
) -> None:
    """Parameters have the same bits."""
    site = joined(rank, world_size, rules)
    train(site.model, site.optimizer, rank, range(9))
    model, optimizer, handle = in_sites(rules)
    train(model, optimizer, rank, range(9))
    equal(local_weights(site.model), local_weights(model))
    assert site.handle.metrics().failed == 0
    assert handle.metrics().exchanges == site.handle.metrics().exchanges
    assert handle.metrics().wire_bytes == site.handle.metrics().wire_bytes


@on_ranks(3)
def test_other_anchors_are_replaced_by_those_of_most_sites(rank: int, world_size: int) -> None:
    site = joined(rank, world_size, script=[Round((0, 1, 2), failed=i == 2) for i in range(9)])
    train(site.model, site.optimizer, rank, range(2))
    if rank == 1:
        site.exchange.anchors[0].values[3] += 1
    train(site.model, site.optimizer, rank, range(2, 6))
    for anchor in site.exchange.anchors:
        assert all(torch.equal(anchor.values, other) for other in gathered(anchor.values))
    assert site.handle.metrics().healed == (rank > 0) + (rank == 1)
    assert site.handle.metrics().failed == 1


@on_ranks(2)
def test_resumes_to_the_bit(rank: int, world_size: int) -> None:
    """From an exchange in flight."""
    site = joined(rank, world_size, DELAYED)
    train(site.model, site.optimizer, rank, range(4))
    state, own = site.handle.state_dict(), deepcopy(site.optimizer.state_dict())
    weights = local_weights(site.model)
    train(site.model, site.optimizer, rank, range(4, 7))
    again = joined(rank, world_size, DELAYED, run="again")
    again.handle.load_state_dict(state)
    again.optimizer.load_state_dict(own)
    again.model.load_state_dict(weights)
    equal(again.handle.state_dict(), state)
    train(again.model, again.optimizer, rank, range(4, 7))
    equal(local_weights(again.model), local_weights(site.model))
    equal(unnamed(again.handle.state_dict()), unnamed(site.handle.state_dict()))
    assert again.manager.current_step() == site.manager.current_step()


def unnamed(state: dict[str, Any]) -> dict[str, Any]:
    """A state without the names of exchanges, which are drawn, and without its digest."""
    return {k: t for k, t in state.items() if not k.endswith("sites.counted") and ".about" not in k}


def torchft_nccl() -> str:
    return "torchft-nccl"


def no_quorum(**_: Any) -> None:
    raise TimeoutError("after 5 s")


@on_ranks(2)
@pytest.mark.parametrize(
    ("rules", "manager", "message"),
    [
        (POLICY, {"_use_async_quorum": True}, "Manager with use_async_quorum=False"),
        (POLICY, {"_init_sync": False}, "torchft.Manager with init_sync=True"),
        (POLICY, {"_quorum_retries": 0}, "make it with quorum_retries="),
        (POLICY, {"getBackendName": torchft_nccl}, "give it torchft.ProcessGroupGloo"),
        (POLICY, {"start_quorum": no_quorum}, "no quorum of sites: after 5 s"),
        (policy(LEAD), {}, "leave lead out for sites that come and go"),
    ],
    ids=["quorum", "starts", "retries", "group", "no quorum", "lead"],
)
def test_refusals(
    rank: int, world_size: int, rules: Any, manager: dict[str, Any], message: str
) -> None:
    site = ElasticSite(rank, world_size, [Round((0, 1))], rules)
    vars(site.manager).update(manager)
    assert message in fails(site.start)[1]


@on_ranks(2)
def test_a_parameter_that_is_not_finite(rank: int, world_size: int) -> None:
    """A site that has one does not meet the others."""
    site = joined(rank, world_size)
    train(site.model, site.optimizer, rank, range(1))
    site.model.get_parameter("head.bias").data.fill_(torch.nan)
    kind, text = fails(site.optimizer.step)
    assert kind == "FloatingPointError"
    assert "parameter 'head.bias' in this site has a NaN" in text
    assert site.manager.now == 1


# With a delay: an exchange fails while training goes on.
BOTH = Round((0, 1))


@on_ranks(2)
def test_a_state_that_is_loaded_over_a_failed_flight(rank: int, world_size: int) -> None:
    """What was owed before the flight is put back before the load, and not again after it."""
    site = joined(rank, world_size, DELAYED)
    train(site.model, site.optimizer, rank, range(4))
    state = site.handle.state_dict()
    assert any(state[name].any() for name in state if "in_flight" in name)
    script = [BOTH, Round((0, 1), failed=1), *[BOTH] * 6]
    again = joined(rank, world_size, DELAYED, run="again", script=script)
    train(again.model, again.optimizer, rank, range(4))
    again.handle.load_state_dict(state)
    equal(again.handle.state_dict(), state)


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
    for anchor, before in zip(site.exchange.anchors, site.exchange._owed, strict=True):
        equal(anchor.reducer.residuals, before.residuals)
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


@on_ranks(4)
def test_no_rank_trains_on_while_another_waits(rank: int, world_size: int) -> None:
    """One rank of a site gets no group: its neighbour would wait in FSDP for it."""
    site = ElasticSite(
        rank, world_size, [BOTH, Round((0, 1), failed=1), BOTH, BOTH], DELAYED, "FSDP2"
    )
    site.manager.seconds = 1.0
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


@on_ranks(2)
def test_sites_draw_different_dithers(rank: int, world_size: int) -> None:
    """Every site counts its ranks from 0."""
    codec = {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"}
    with patch.object(dist, "get_rank", return_value=0):
        site = joined(
            rank, world_size, policy({"when": FOUR_BITS["when"], "codec": codec}, every=2)
        )
    for anchor in site.exchange.anchors:
        programs = anchor.reducer.programs
        for encoding in programs.encodings.values():
            mine, other = gathered(anchor.reducer.store[encoding.seeds])
            assert (mine != other).all()

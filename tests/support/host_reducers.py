"""Reducers of ranks that share hosts, without a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from support.units import unit_reducer, world
from tagc.collect import RankOnHost, UnitReducer, gather_by_rank
from tagc.collect.hosts import host_groups
from tagc.plan import UnitPlan, build_plan
from tagc.policy import Policy

RANKS_PER_HOST = 2


def in_two_levels(
    plan: UnitPlan, codec: dict[str, Any], feedback: dict[str, Any] | None = None, **keys: Any
) -> UnitPlan:
    """A unit of :mod:`support.units`, with several ranks on a host.

    Args:
        keys: of the policy.
    """
    info = replace(plan.info, ranks_per_host=RANKS_PER_HOST)
    feedback = feedback or {"kind": "residual"}
    rule = {"when": {"name": ["a.*", "c*"]}, "codec": codec, "feedback": feedback}
    policy = Policy.load({"schema": 1, "gradients": [rule], **keys})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units as small as this may send more when compressed
        return build_plan([info], policy).units[0]


@contextmanager
def host_reducer(rank: int, plan: UnitPlan, **options: Any) -> Iterator[UnitReducer]:
    """A reducer in hosts of two ranks.

    Args:
        options: of :class:`tagc.collect.UnitReducer`.
    """
    places = gather_by_rank([world()], {rank: RankOnHost.mine()})
    groups = host_groups(world(), RANKS_PER_HOST, torch.device("cpu"), places)
    dist.barrier()  # or a rank may release its groups while another still connects them
    yield unit_reducer(plan, hosts=groups, **options)
    groups.release()

"""Reducers of ranks that share hosts, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tagc.codecs.workspace import Workspace
from tagc.collect import RankOnHost, UnitReducer, gather_by_rank
from tagc.collect.hosts import host_groups
from tagc.ops import get_ops
from tagc.plan import UnitPlan, build_plan
from tagc.policy import Policy

RANKS_PER_HOST = 2


def in_two_levels(plan: UnitPlan, codec: dict[str, Any], **keys: Any) -> UnitPlan:
    """The unit of :func:`support.units.codec_plan`, with several ranks on a host.

    Args:
        keys: of the policy.
    """
    info = replace(plan.info, ranks_per_host=RANKS_PER_HOST)
    feedback = {"kind": "residual"}
    rule = {"when": {"name": ["a.*", "c.*"]}, "codec": codec, "feedback": feedback}
    return build_plan([info], Policy.load({"schema": 1, "gradients": [rule], **keys})).units[0]


@contextmanager
def host_reducer(rank: int, plan: UnitPlan, **options: Any) -> Iterator[UnitReducer]:
    """A reducer in hosts of two ranks.

    Args:
        options: of :class:`tagc.collect.UnitReducer`.
    """
    cpu, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    places = gather_by_rank([group], {rank: RankOnHost.mine()})
    groups = host_groups(group, RANKS_PER_HOST, cpu, places)
    dist.barrier()  # or a rank may release its groups while another still connects them
    yield UnitReducer(
        plan,
        get_ops(cpu),
        cpu,
        Workspace(cpu),
        seed=7,
        rank=rank,
        hosts=groups,
        **options,
    )
    groups.release()

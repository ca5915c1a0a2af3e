"""A rehearsal calls the operators that a step calls, and compiles all that a step launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tagc
from support.distributed import run_ranks
from support.gathering import INT8
from support.marks import slow
from support.small_net import sharded
from support.states import POLICIES, QUANTIZED, rules, run, wrapped
from tagc.collect import rehearse
from tagc.ops import get_ops
from tagc.selfcheck import Call, Recorder


def called(rank: int, policy: Any, hosts: int | None, copies: int) -> tuple[set[Call], set[Call]]:
    """In three steps of training, and in the rehearsal of their plan."""
    options: dict[str, Any] = {}
    if copies > 1:
        names = ("copies", "shards")
        options["mesh"] = init_device_mesh("cpu", (copies, 1), mesh_dim_names=names)
    recorder = Recorder(get_ops("cpu", "reference"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tagc.handle.collectives.get_ops", lambda device, name=None: recorder)
        model = wrapped(policy, sharded(**options), hosts=hosts)
    recorder.calls.clear()
    run(model, rank, range(3))
    trained = set(recorder.calls)
    rehearsed = Recorder()
    rehearse(tagc.compressor(model).plan(), rehearsed.ops, stamped=False)
    dist.barrier()
    return trained, set(rehearsed.calls)


QUICK = ("matrix lead", "sketch shared")
OTHERS = ("quantized dithered", "changes", "changes in 2 bits", "sketch")
GATHERED = rules(QUANTIZED, parameters=[{"when": {"name": "*.weight"}, "codec": INT8}])
OVER_REPLICAS = {
    "schema": 1,
    "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
    "replicas": POLICIES["quantized residual"]["gradients"],
}


@pytest.mark.parametrize(
    ("ranks", "policy", "hosts", "copies"),
    [
        *((2, POLICIES[name], None, 1) for name in QUICK),
        (4, GATHERED | {"inside": "int8"}, 2, 1),
        slow(3, OVER_REPLICAS, None, 3),
        *(slow(2, POLICIES[name], None, 1) for name in OTHERS),
    ],
    ids=[*QUICK, "hosts", "replicas", *OTHERS],
)
def test_a_rehearsal_calls_what_training_calls(
    ranks: int, policy: dict[str, Any], hosts: int | None, copies: int
) -> None:
    for trained, rehearsed in run_ranks(called, ranks, policy, hosts, copies):
        assert len(trained) >= 2
        assert trained == rehearsed

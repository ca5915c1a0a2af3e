"""Codec `matrix` under FSDP2: which rows and columns a shard has, and what it refuses."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tagc
from support.block_net import wrap
from support.distributed import on_ranks
from tagc.codecs.matrix import MatrixPlan
from tagc.policy import Policy

ONE_OF_8 = {"kind": "matrix", "group": 8}
LEAD = {"kind": "residual", "lead": 0.4}


class Layers(nn.Module):
    """`deep` has three dimensions, no first dimension divides by 2 or 3, and `tail` is
    sharded by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Parameter(torch.randn(5, 6, 4))
        self.tall = nn.Linear(24, 7, bias=False)
        self.wide = nn.Linear(7, 36)
        self.tail = nn.Linear(36, 1)


def layers() -> Any:
    torch.manual_seed(1)
    model = Layers()
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.shape[1:] == (36,) else None)
    return model


NAMES = ["deep", "tall.weight", "wide.weight", "tail.weight"]


def policy(
    codec: dict[str, Any], feedback: dict[str, Any] | None = None, names: Any = NAMES
) -> dict[str, Any]:
    rule: dict[str, Any] = {"when": {"name": names}, "codec": codec}
    if feedback is not None:
        rule["feedback"] = feedback
    return {"schema": 1, "gradients": [rule]}


def shapes(model: Any) -> dict[str, list[tuple[int, int]]]:
    """Rows and columns of every matrix of the plan."""
    found = {}
    for segment in tagc.compressor(model).plan().units[0].segments:
        if isinstance(segment.codec, MatrixPlan):
            layouts = iter(segment.codec.layouts)
            counts = segment.codec.matrices_of_parameters
            for param, count in zip(segment.params, counts, strict=True):
                of_param = list(islice(layouts, count))
                assert sum(layout.numel for layout in of_param) == param.columns
                found[param.name] = [(layout.rows, layout.columns) for layout in of_param]
    return found


@on_ranks(2, 3)
def test_shards_of_every_kind(rank: int, world_size: int) -> None:
    """That nothing is lost is in `tests/parity` and in `tests/collect/test_conservation.py`."""
    assert shapes(wrap(layers(), policy(ONE_OF_8, LEAD))) == {
        # 3 + 24 scales are fewer than 3 * (6 + 4), but two matrices' are fewer than 2 + 24.
        "deep": [(3, 24)] if world_size == 2 else [(6, 4)] * 2,
        "tall.weight": [(-(-7 // world_size), 24)],
        "wide.weight": [(36 // world_size, 7)],
        "tail.weight": [(1, 36 // world_size)],
    }


@on_ranks(4)
def test_tensor_parallel_rows(rank: int, world_size: int) -> None:
    """Under tensor parallelism a rank has `down` in 5 rows of 6 of its columns, and FSDP shards
    the rows: 3 of 6, where 5 rows of 12 would have said 1 row."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layers = {name: nn.Linear(*of, bias=False) for name, of in (("up", (5, 12)), ("down", (12, 5)))}
    model: Any = nn.Sequential(OrderedDict(layers))
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    wrap(
        fully_shard(model, mesh=mesh["data"]),
        policy({"kind": "matrix", "bits": 2}, names=["*.weight"]),
    )
    assert shapes(model) == {"up.weight": [(3, 5)], "down.weight": [(3, 6)]}


@pytest.mark.parametrize(
    ("codec", "feedback", "words"),
    [
        ({"bits": 2, "group": 8}, None, "bits 2: a group of 8 needs bits 1"),
        ({"group": 4}, None, "codec.group: unknown value 4; did you mean 8 or 1?"),
        ({}, {"kind": "residual", "lead": 0}, "lead: must be greater than or equal to 0.05"),
        ({}, {"kind": "average", "lead": 0.5}, "lead: only for the kind 'residual'"),
    ],
)
def test_rules_that_cannot_be(
    codec: dict[str, Any], feedback: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(tagc.PolicyError) as caught:
        Policy.load(policy({"kind": "matrix", **codec}, feedback))
    assert words in str(caught.value)

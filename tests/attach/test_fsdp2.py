"""FSDP2: its numbers and names, and copies of a sharded model. Its options are in the parity matrix
(`tests/parity`)."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import record_function

import tagc
from parity.option import wrap_blocks
from support import fsdp1_net, small_net
from support.block_net import net, sharded, wrap
from support.counting import counted_bytes
from support.distributed import fails, on_ranks
from support.exact import EXACT, equal
from support.profiling import profiled_functions
from support.small_net import EVERYTHING
from support.units import gathered, policy
from tagc.codecs.matrix import MatrixPlan


@on_ranks(1)
def test_one_rank_warns_and_changes_nothing(rank: int, world_size: int) -> None:
    native, wrapped = small_net.sharded(), small_net.sharded()
    with pytest.warns(UserWarning, match="does nothing at world size 1") as caught:
        assert tagc.wrap(wrapped, EVERYTHING) is wrapped
    assert {warning.filename for warning in caught} == {__file__}  # the user's own line
    torch.testing.assert_close(
        small_net.train(wrapped, rank, 2), small_net.train(native, rank, 2), **EXACT
    )
    assert tagc.compressor(wrapped).metrics().wire_bytes == 0


# Numbers and names


def mean(x: float) -> float:
    """The average over ranks: with FSDP1, what a rank sends depends on what the others own."""
    return gathered(torch.tensor([x], dtype=torch.float64)).mean().item()


@on_ranks(3)
@pytest.mark.parametrize("shard", [small_net.sharded, fsdp1_net.sharded], ids=["FSDP2", "FSDP1"])
def test_wire_bytes(rank: int, world_size: int, shard: Any) -> None:
    """Counted three ways: by the metrics, by the plan and from the tensors that collectives get."""
    model = shard()
    some = {"name": ["second.*.weight", "head.weight"]}  # none of two other units
    tagc.wrap(model, policy((some, 0.05), ({"name": "second.*.bias"}, 0.5)))
    compressor = tagc.compressor(model)
    small_net.loss_of(model, rank, 0).backward()
    before = compressor.metrics()
    with counted_bytes() as handed:
        for step in range(3):
            small_net.loss_of(model, rank, step).backward()
    after, rows = compressor.metrics(), compressor.plan().rows
    assert after.wire_bytes - before.wire_bytes == sum(handed)
    fsdp1 = shard is fsdp1_net.sharded
    for prefix in ("", "compressed_"):
        near = 1e-3 if fsdp1 and prefix else 1e-12  # whose padding is of no parameter
        counted = [row for row in rows if not prefix or row.codec != "dense"]
        for name in ("wire_bytes", "dense_bytes"):
            sent = getattr(after, prefix + name) - getattr(before, prefix + name)
            # A segment's bytes are split among its parameters in floats.
            planned = 3 * sum(getattr(row, name) for row in counted)
            assert planned == pytest.approx(mean(sent), rel=near)
    held = sum(r.nbytes for reducer in compressor.reducers for r in reducer.residuals.values())
    assert sum(row.stored_bytes for row in rows) == pytest.approx(mean(held), rel=1e-12)
    names = [name for name, _ in small_net.net().named_parameters()]
    assert sorted(row.param for row in rows) == sorted(names)
    assert all(f" {name} " in compressor.plan().full for name in names)
    if fsdp1:  # its own buffers
        buffers = [len(fsdp1_net.owners_in(unit, world_size)) for unit in fsdp1_net.UNITS]
        dense = sum(4 * n // world_size * (world_size - 1) for n in buffers)
        assert after.dense_bytes - before.dense_bytes == 3 * dense


@on_ranks(2)
def test_profiler_ranges_name_the_unit(rank: int, world_size: int) -> None:
    model = tagc.wrap(small_net.sharded(), EVERYTHING)
    recorded = patch("tagc.collect.replay.record_function", wraps=record_function)
    with profiled_functions(), recorded as ranges:
        small_net.loss_of(model, rank, 0).backward()
    names = {call.args[0] for call in ranges.call_args_list}
    for unit in ("first.2", "first", "second", "(root)"):
        for stage in ("encode", "exchange", "decode"):
            assert f"TAGC::{stage} ({unit})" in names


@on_ranks(2)
def test_wrappers_do_not_show_in_names(rank: int, world_size: int) -> None:
    """A policy is about the model, whoever recomputes or compiles parts of it."""
    plain, wrapped = net(), net()
    wrap_blocks(wrapped)
    wrapped.head = torch.compile(wrapped.head, backend="eager")
    rows = [
        [row.param for row in tagc.compressor(wrap(sharded(m))).plan().rows]
        for m in (plain, wrapped)
    ]
    assert rows[0] == rows[1]
    assert "blocks.1.down.weight" in rows[1]
    units = tagc.compressor(wrapped).plan().units
    assert [unit.info.name for unit in units] == ["", "blocks.0", "blocks.1"]


QUANTIZED = {"when": {"name": "*.weight"}, "codec": {"kind": "quantized", "bits": 4, "block": 32}}


@on_ranks(4)
def test_the_same_as_tagc_averages_over_replicas_that_it_is_given(
    rank: int, world_size: int
) -> None:
    """To the bit: gradients in both directions, and what they cost."""
    policy = {"gradients": [QUANTIZED], "replicas": [QUANTIZED]}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model: Any = small_net.net()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    wrap(model, {"schema": 1, **policy})
    other, _ = small_net.wrapped(policy)
    one, two = (small_net.train(each, rank, 2) for each in (model, other))
    torch.testing.assert_close(one, two, **EXACT)
    mine, theirs = (tagc.compressor(m).metrics() for m in (model, other))
    assert mine == theirs
    assert 0 < mine.replica_wire_bytes < mine.replica_dense_bytes
    for weight in small_net.local_weights(model).values():
        torch.testing.assert_close(*small_net.of_replicas(weight, mesh["copies"]), **EXACT)


@on_ranks(4)
def test_what_waits_in_a_replica_is_in_no_state(rank: int, world_size: int) -> None:
    """As what waits on a host: it cannot be saved, and a load or the user drops it."""
    codec = {"kind": "quantized", "bits": 8, "block": 32}
    rule = {"when": {"name": "*weight"}, "codec": codec, "feedback": {"kind": "none"}}
    model, _ = small_net.wrapped({"gradients": [rule], "replicas": [rule]})
    compressor = tagc.compressor(model)
    state = compressor.state_dict()

    def gradients(of: Any) -> dict[str, torch.Tensor]:
        of.zero_grad()
        small_net.loss_of(of, rank, 0).backward()
        return small_net.local_grads(of)

    expected = gradients(small_net.wrapped({"gradients": [rule], "replicas": [rule]})[0])
    for drop in (compressor.drop_waiting, lambda: compressor.load_state_dict(state)):
        model.set_requires_all_reduce(False)
        (1000 * small_net.loss_of(model, rank, 0)).backward()
        kind, text = fails(compressor.state_dict)
        assert (kind, "micro-batches that wait" in text) == ("RuntimeError", True), text
        drop()
        model.set_requires_all_reduce(True)
        equal(gradients(model), expected)


# Codec `matrix`: which rows and columns a shard has


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


def matrices(names: Any, **codec: Any) -> dict[str, Any]:
    rule = {"when": {"name": names}, "codec": {"kind": "matrix", **codec}}
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
    assert shapes(wrap(layers(), matrices(["deep", "*.weight"]))) == {
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
    wrap(fully_shard(model, mesh=mesh["data"]), matrices("*.weight", bits=2))
    assert shapes(model) == {"up.weight": [(3, 5)], "down.weight": [(3, 6)]}

"""What FSDP1's ranks send, owe and hand out, element by element in its own flat buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.distributed import on_ranks
from support.exact import EXACT
from support.fsdp1_net import flat_of, quietly, sharded
from support.marks import covering
from support.small_net import net
from support.units import gathered, on_grid
from tagc.collect import UnitReducer
from tagc.plan.param_slices import param_slices

SUM = dist.ReduceOp.SUM


def reducers(rule: dict[str, Any], world_size: int) -> Iterator[tuple[UnitReducer, Tensor]]:
    """Of every unit: its reducer, and what of FSDP1's buffer is a parameter's, ``[W, S]``."""
    model = quietly(tagc.wrap, sharded(), {"schema": 1, "gradients": [rule]})
    zeros = {name: torch.zeros_like(p) for name, p in net().named_parameters()}
    for reducer in tagc.compressor(model).reducers:
        _, owners = flat_of(reducer.plan.info.name, zeros, world_size, use_orig_params=False)
        yield reducer, torch.tensor([bool(owner) for owner in owners]).view(world_size, -1)


CODECS: dict[str, dict[str, Any]] = {
    "sketch": {"kind": "sketch", "density": 0.4, "symbol": "int8x4"},
    "sketch shared": {"kind": "sketch", "density": 0.7, "symbol": "int8x4", "support": "shared"},
    "packed": {"kind": "packed", "density": 0.4},
}


@pytest.mark.some(1)
@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "codec", "names"), covering((3, 4), CODECS, ["second.0.weight", "*"])
)
def test_the_sum_is_what_ranks_no_longer_owe(
    rank: int, world_size: int, codec: str, names: str
) -> None:
    """Element by element, in FSDP1's own columns."""
    rule = {"when": {"name": names}, "codec": CODECS[codec], "feedback": {"kind": "residual"}}
    group = dist.group.WORLD
    assert group is not None
    for reducer, is_param in reducers(rule, world_size):
        S = is_param.shape[1]
        owed = torch.zeros(world_size, S, dtype=torch.float64)
        for step in range(4):
            buffers = on_grid(world_size, S, step) * is_param
            out = torch.full((S,), torch.nan)
            reducer.reduce(out, buffers[rank].flatten(), group, SUM)
            everyones = gathered(in_rows(reducer))
            left = everyones[:, rank]
            due = owed + buffers[:, rank].double()
            # What a rank sends is exact, and so is the integer sum of a sketch; the owner of a
            # packed message adds in float32.
            atol = 0 if "sketch" in codec else 2**-23 * due.abs().sum(0).max().item()
            torch.testing.assert_close(out.double(), (due - left).sum(0), rtol=0, atol=atol)
            owed = left
            assert reducer.plan.info.name != "second" or (out.any() and everyones.any())


@pytest.mark.some(3)
@on_ranks(2, 3)
@pytest.mark.parametrize("names", ["second.0.weight", "*"])
def test_what_an_owner_keeps_is_of_its_own_elements(rank: int, world_size: int, names: str) -> None:
    """A lead's formula, element by element, from the first dense reduction on: with a half, and
    sums of few multiples of 1/8, nothing rounds."""
    codec = {"kind": "sketch", "density": 0.4, "symbol": "int8x4", "warmup_steps": 2}
    rule = {"when": {"name": names}, "codec": codec, "feedback": {"kind": "residual", "lead": 0.5}}
    group = dist.group.WORLD
    assert group is not None
    for reducer, is_param in reducers(rule, world_size):
        S = is_param.shape[1]
        compressed = of_compressed(reducer, rank)
        owed, sent = torch.zeros(S).double(), torch.zeros(S).double()
        for step in range(5):
            buffers = on_grid(world_size, S, step) * is_param
            out = torch.full((S,), torch.nan)
            reducer.reduce(out, buffers[rank].flatten(), group, SUM)
            left = gathered(in_rows(reducer))[:, rank].sum(0)
            grad = buffers[:, rank].double().sum(0)
            expected = grad
            if step >= 2:
                before, sent = sent, owed + grad - left
                expected = (sent - before / 2) * 2
            owed = left
            expected = torch.where(compressed, expected, grad)
            torch.testing.assert_close(out.double(), expected, **EXACT)


def of_compressed(reducer: UnitReducer, row: int) -> Tensor:
    """Which of FSDP1's columns of a row are not dense, ``[S]``."""
    found = torch.zeros(reducer.plan.buffer_columns, dtype=torch.bool)
    for segment in reducer.plan.compressed:
        for piece in param_slices(reducer.plan.info, segment.params):
            if piece.row == row:
                found[piece.start : piece.start + piece.length] = True
    return found


def in_rows(reducer: UnitReducer) -> Tensor:
    """This rank's residual ``[W, S]`` in FSDP1's columns."""
    rows = torch.zeros(reducer.plan.info.world_size, reducer.plan.buffer_columns).double()
    for segment in reducer.plan.compressed:
        residual = reducer.residuals[segment.start]
        seen = torch.zeros_like(residual, dtype=torch.bool)
        for piece in param_slices(reducer.plan.info, segment.params):
            columns = slice(piece.column, piece.column + piece.length)
            rows[piece.row, piece.start : piece.start + piece.length] = residual[piece.row, columns]
            seen[piece.row, columns] = True
        # Nothing is owed to what fills a segment up.
        assert not residual[~seen].any()
    return rows

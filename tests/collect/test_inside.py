"""What ranks of a host add up may travel between them in fewer bits: policy key ``inside``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.host_reducers import host_reducer, in_two_levels
from support.units import codec_plan, gathered, normal, reduce
from tagc.plan import UnitPlan, build_plan, bytes_inside
from tagc.policy import Policy

SUM = dist.ReduceOp.SUM
OWING = {"kind": "quantized", "bits": 4, "block": 64}
FORMS = ("bfloat16", "int8")


def plan_of(world_size: int, inside: str, codec: dict[str, Any] = OWING) -> UnitPlan:
    return in_two_levels(codec_plan(world_size, codec), codec, inside=inside)


def integers(world_size: int, columns: int, step: int) -> Tensor:
    """`[R, W, S]` that either form carries as they are: every block's largest is 127."""
    generator = torch.Generator().manual_seed(step)
    shape = (world_size, world_size, columns)
    buffers = torch.randint(-127, 128, shape, generator=generator).float()
    buffers[..., ::20] = 127
    return buffers


@on_ranks(4)
def test_what_fits_is_added_up_as_it_is(rank: int, world_size: int) -> None:
    """To the bit, residuals too; and the plan knows the bytes."""
    native = plan_of(world_size, "native")
    assert native.inside is None
    sent = {"native": bytes_inside(native)}
    results = {inside: outcome(rank, plan_of(world_size, inside)) for inside in ("native", *FORMS)}
    for inside in FORMS:
        for mine, theirs in zip(results[inside], results["native"], strict=True):
            assert torch.equal(mine, theirs)
        sent[inside] = bytes_inside(plan_of(world_size, inside))
    dense = sum(s.columns for s in native.segments if not s.compressed)
    rows = 2 * 4  # two hosts, a neighbour each; bytes of a word
    assert sent["native"] == rows * native.columns
    # 911 and 303 columns: words of two elements, or blocks of 256 with half a word each; segments
    # begin at a multiple of 4 words, and messages at one of 32.
    assert dense == 35
    assert sent["bfloat16"] == rows * 672 >= rows * (456 + 152 + dense + 2)
    assert sent["int8"] == rows * 448 >= rows * (4 + 4 * 64 + 4 + 2 * 64 + dense + 2)


def outcome(rank: int, plan: UnitPlan) -> list[Tensor]:
    """Of three steps, and what is owed then."""
    found: list[Tensor] = []
    with host_reducer(rank, plan) as reducer:
        for step in range(3):
            found.append(reduce(reducer, integers(4, plan.columns, step)[rank], SUM))
        assert reducer.counters.inside_bytes == 3 * bytes_inside(plan)
        found += [residual.clone() for residual in reducer.residuals.values()]
    return found


@on_ranks(4)
def test_what_is_rounded_by_chance_is_right_on_average(rank: int, world_size: int) -> None:
    """Of steps, and of micro-batches that wait: none rounds as another did."""
    repeats = 16
    plan = plan_of(world_size, "int8")
    buffers = normal(world_size, plan.columns, 0)
    exact = buffers.double().sum(0)[rank]
    once = conserved(rank, plan, buffers[rank], 1) - exact
    mean = conserved(rank, plan, buffers[rank], repeats) / repeats - exact
    for s in plan.compressed:
        # If they are independent, the mean square is a 16th; allow for twice that.
        pair = [off[s.start : s.stop].square().mean() for off in (mean, once)]
        assert 0 < pair[0] < pair[1] / 8
    for s in (s for s in plan.segments if not s.compressed):
        # But for the rounding of float32, of every step or micro-batch.
        assert mean[s.start : s.stop].abs().max() < 2**-24 * (repeats + 4) * buffers.abs().max()


def conserved(rank: int, plan: UnitPlan, buffer: Tensor, repeats: int) -> Tensor:
    """What this rank was handed out and is owed, ``[S]``, after the same gradient so many times,
    which is all that ranks of a host did not round away; every other time is a micro-batch that
    waits for the next one."""
    waits = iter([i % 2 == 0 for i in range(repeats - 1)])
    with host_reducer(rank, plan, crosses=lambda: not next(waits, False)) as reducer:
        outs = [reduce(reducer, buffer, SUM).double() for _ in range(repeats)]
        owed = torch.zeros(plan.peers, plan.columns, dtype=torch.float64)
        for start, residual in reducer.residuals.items():
            owed[:, start : start + residual.shape[1]] = residual
    # By those with this one's place on every host, about this one's host.
    host, place = divmod(rank, 2)
    return torch.stack(outs).sum(0) + gathered(owed)[place::2, host].sum(0)


@on_ranks(4)
def test_the_warm_up_is_added_up_as_it_is(rank: int, world_size: int) -> None:
    codec = {"kind": "sketch", "density": 0.3, "warmup_steps": 2}
    plans = [plan_of(world_size, inside, codec) for inside in ("native", "int8")]
    found = []
    for plan in plans:
        with host_reducer(rank, plan) as reducer:
            buffers = (normal(world_size, plan.columns, step)[rank] for step in range(3))
            found.append([reduce(reducer, buffer, SUM) for buffer in buffers])
    *warm, first = (torch.equal(*pair) for pair in zip(*found, strict=True))
    assert warm == [True, True]
    assert not first


@pytest.mark.parametrize(
    ("ranks_per_host", "dtype", "codec", "why"),
    [
        (1, torch.float32, OWING, "sends for itself"),
        (2, torch.bfloat16, OWING, "have two bytes already"),
        (2, torch.float32, {"kind": "dense"}, "no gradient is compressed"),
    ],
)
def test_a_plan_says_where_it_changes_nothing(ranks_per_host, dtype, codec, why):
    info = replace(codec_plan(4, OWING, None, dtype).info, ranks_per_host=ranks_per_host)
    rule = {"when": {"name": "a.*"}, "codec": codec}
    policy = Policy.load({"schema": 1, "gradients": [rule], "inside": "bfloat16"})
    plan = build_plan([info], policy)
    assert plan.units[0].inside is None
    notes = [note for note in plan.notes if "inside: bfloat16" in note]
    assert [why in note for note in notes] == [True]

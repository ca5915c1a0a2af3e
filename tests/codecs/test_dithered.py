"""Codec ``quantized`` with stochastic rounding: nothing is kept, and nothing is lost on average."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from support.distributed import on_ranks
from support.units import codec_plan, normal, reduce, unit_reducer
from tagc.codecs.quantized import STAGES, dither_seeds

BLOCK = 32


def stochastic(bits: int) -> dict[str, object]:
    return {"kind": "quantized", "bits": bits, "block": BLOCK, "rounding": "stochastic"}


@on_ranks(2)
def test_a_run_that_goes_on_repeats_what_it_would_have_done(rank, world_size):
    plan = codec_plan(world_size, stochastic(4))
    reducer = unit_reducer(plan)
    grads = [normal(world_size, plan.columns, step)[rank] for step in range(6)]
    first = [reduce(reducer, grad) for grad in grads[:3]]
    state = {name: value.clone() for name, value in reducer.state().items()}
    rest = [reduce(reducer, grad) for grad in grads[3:]]
    again = unit_reducer(plan)
    again.check_state(state)
    again.load_state(state)
    assert all(torch.equal(reduce(again, g), out) for g, out in zip(grads[3:], rest, strict=True))
    # So does one that knows only how many steps there were, as after a change of the layout.
    again.reset(earlier_steps=3)
    assert all(torch.equal(reduce(again, g), out) for g, out in zip(grads[3:], rest, strict=True))
    # And the same gradient is not rounded in the same way again.
    assert not torch.equal(reduce(again, grads[0]), first[0])
    dist.barrier()


def test_no_seed_comes_twice():
    """Of no two units, segments, ranks (also of other replicas), stages, rows and steps."""
    found: list[int] = []
    for i, rank, stage, step in itertools.product(range(4), range(6), STAGES, range(6)):
        unit = (i * 0x9E3779B1) % 2**31
        seeds = dither_seeds((0, 32, 4096), 3, unit=unit, rank=rank, stage=stage, step=step)
        found += seeds.flatten().tolist()
    assert len(found) == 4 * 6 * len(STAGES) * 3 * 6 * 3
    # Of so many numbers of 32 bits, two are the same by chance once in 32 tries.
    assert len(set(found)) >= len(found) - 1

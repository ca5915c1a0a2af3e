"""What goes wrong in a run: ranks that stop or differ, skipped steps. Gradients that are not finite
are in `test_conservation.py`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tagc
from support.block_net import wrap
from support.distributed import as_on_nccl, fails, on_ranks
from support.exact import EXACT
from support.gathering import INT8, gathering
from support.marks import slow
from support.paths import EXAMPLES
from support.small_net import local_grads, loss_of, sharded
from support.states import POLICIES, QUANTIZED, SKETCH, rules

# Ranks that stop


def impatient(seconds: float = 1.0) -> DeviceMesh:
    """All ranks, in a group of their own that soon gives up."""
    group: Any = dist.new_group(timeout=timedelta(seconds=seconds))
    return DeviceMesh.from_group(group, "cpu")


PARAMETERS = gathering(INT8)
STOPPED: tuple[tuple[Any, str], ...] = (
    (rules(SKETCH), "reduction of gradients of unit 'second'"),
    (PARAMETERS, "gathering of parameters of unit '(root)'"),
)


@on_ranks(3)
def test_a_rank_that_stops_answering(rank: int, world_size: int) -> None:
    for spec, where in STOPPED:
        model = wrap(sharded(mesh=impatient(), reshard_after_forward=False), spec)
        loss = None if spec is PARAMETERS else loss_of(model, rank, 0)
        if rank != 1:
            call = loss.backward if loss is not None else partial(loss_of, model, rank, 0)
            kind, text = fails(call)
            assert kind == "RuntimeError"
            assert f"tagc: the {where} failed on rank {rank} of 3" in text, text
            assert "another rank failed or stopped" in text
        dist.barrier()


# Ranks that differ


@on_ranks(4)
def test_an_error_in_some_groups_of_replicas(rank: int, world_size: int) -> None:
    """The rank across shares no group with the one that fails."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for bad, how in ((3, "policy"), (0, "ops"), (3, "model")):
        model = sharded(mesh=mesh["shard"])
        here = how if rank == bad else ""
        spec: Any = "mlp-onli" if here == "policy" else rules(QUANTIZED)
        ops = "cqu" if here == "ops" else None
        if here == "model":
            model.requires_grad_(False)
        call = partial(wrap, model, spec, replicas=mesh["replicate"], ops=ops)
        kind, text = fails(call)
        if here:
            assert kind in ("PolicyError", "ValueError"), text
        else:
            assert (kind, "tagc.wrap failed on rank" in text) == ("RuntimeError", True), text
    wrap(sharded(mesh=mesh["shard"]), replicas=mesh["replicate"])


# Skipped steps and loss scales


@on_ranks(2)
@pytest.mark.parametrize("policy", ["whole lead", "sketch"])
def test_residuals_follow_the_loss_scale(rank: int, world_size: int, policy: str) -> None:
    """Scales are powers of two, so unscaled gradients have the bits of a run without a scale."""
    scales = (1.0, 4.0, 0.5)
    runs = []
    for scaled in (False, True):
        model = wrap(sharded(), POLICIES[policy])
        grads, last = [], 1.0
        for step, scale in enumerate(scales if scaled else (1.0,) * len(scales)):
            tagc.compressor(model).scale_residuals(scale / last)
            last = scale
            (scale * loss_of(model, rank, step)).backward()
            grads.append({name: g / scale for name, g in local_grads(model).items()})
            model.zero_grad()
        runs.append(grads)
    torch.testing.assert_close(runs[1], runs[0], **EXACT)


@on_ranks(2)
def test_bad_factors(rank: int, world_size: int) -> None:
    model = wrap(sharded(), rules(QUANTIZED))
    grads_of(model, rank, 0)
    before = tagc.compressor(model).copy_residuals()
    for factor in (0, -1.0, math.inf, math.nan, 1e300, 1e-300):
        with pytest.raises(ValueError, match="positive and finite"):
            tagc.compressor(model).scale_residuals(factor)
    with pytest.raises(ValueError, match="must be one number"):
        tagc.compressor(model).scale_residuals(torch.ones(2))
    torch.testing.assert_close(tagc.compressor(model).copy_residuals(), before, **EXACT)
    head = {"when": {"name": "head.*"}, "codec": QUANTIZED}
    other = wrap(sharded(), {"schema": 1, "gradients": [head]})
    with pytest.raises(ValueError, match="not taken from this model"):
        tagc.compressor(model).restore_residuals(tagc.compressor(other).copy_residuals())


@pytest.mark.slow
def test_the_example_of_a_loss_scaler_runs(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLES / "loss_scaling.py"),
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1].rstrip(",")) for line in done.stdout.splitlines()]
    assert losses[-1] < losses[0] / 2


RULES = {
    "lead": rules({"kind": "matrix", "level": 1.3}, {"kind": "residual", "lead": 0.83}),
    "stochastic": POLICIES["quantized dithered"],
    "sketch": POLICIES["sketch"],
    "shared": POLICIES["sketch shared"],
}


def grads_of(model: Any, rank: int, step: int, factor: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    (loss_of(model, rank, step) * factor).backward()
    return local_grads(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("rule", "before"), [("lead", 0), ("sketch", 2), slow("stochastic", 2), slow("shared", 0)]
)
def test_the_next_steps_are_those_without_it(
    rank: int, world_size: int, rule: str, before: int
) -> None:
    """To the bit; also where the very first step is skipped, and what it sent was not finite."""
    model, other = (wrap(sharded(), RULES[rule]) for _ in range(2))
    for step in range(before):
        grads_of(model, rank, step)
        grads_of(other, rank, step)
    compressor = tagc.compressor(model)
    copy = compressor.copy_residuals()
    for skipped in (7.0, math.inf if rank == 0 else 1.0):
        grads_of(model, rank, 9, skipped)
        compressor.restore_residuals(copy, where=False)
        compressor.restore_residuals(copy)
    for step in range(before, before + 2):
        mine, its = grads_of(model, rank, step), grads_of(other, rank, step)
        torch.testing.assert_close(mine, its, **EXACT)


@on_ranks(2)
def test_a_tensor_restores_what_no_host_counts(rank: int, world_size: int) -> None:
    """Residuals and what was sent last."""
    model = wrap(sharded(), RULES["lead"])
    compressor = tagc.compressor(model)

    def kept() -> list[Tensor]:
        """After a step."""
        return [
            tensor.clone()
            for reducer in compressor.reducers
            for name, tensor in reducer.store
            if name.startswith(("sent.", "residual"))
        ]

    grads_of(model, rank, 0)
    copy, first = compressor.copy_residuals(), kept()
    grads_of(model, rank, 1, 7.0)
    after = kept()
    assert not any(torch.equal(a, b) for a, b in zip(after, first, strict=True) if b.any())
    for taken, expected in ((0.0, after), (1.0, first)):
        compressor.restore_residuals(copy, where=torch.tensor(taken))
        torch.testing.assert_close(kept(), expected, **EXACT)


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "one rank scales": lambda compressor, rank: rank or compressor.scale_residuals(2.0),
    "by other factors": lambda compressor, rank: compressor.scale_residuals(2.0 + rank),
    "one rank restores": lambda compressor, rank: (
        rank or compressor.restore_residuals(compressor.copy_residuals())
    ),
    "one rank drops": lambda compressor, rank: rank or compressor.drop_waiting(),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("headers", "calls"), [(True, [*CALLS]), (False, ["by other factors"])], ids=["gloo", "NCCL"]
)
def test_calls_of_one_rank_alone(
    rank: int, world_size: int, headers: bool, calls: Sequence[str]
) -> None:
    """The next reduction tells all ranks, whatever the backend; a load starts over."""
    for call in calls:
        with nullcontext() if headers else as_on_nccl():
            model = wrap(sharded(), rules(SKETCH))
            compressor = tagc.compressor(model)
            grads_of(model, rank, 0)
            compressor.scale_residuals(torch.tensor(2.0))
            state = compressor.state_dict()
            CALLS[call](compressor, rank)
            compressor.load_state_dict(state)
            grads_of(model, rank, 1)
            CALLS[call](compressor, rank)
            kind, text = fails(lambda model=model: grads_of(model, rank, 2))
        assert kind == ("DesyncError" if headers else "RuntimeError"), text
        assert "call them on every rank alike" in text

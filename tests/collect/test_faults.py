"""What goes wrong in a run: ranks that stop, gradients that are not finite, skipped steps."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import tagc
from parity.model import loss_of
from support.block_net import net, sharded, wrap
from support.distributed import as_on_nccl, on_ranks
from support.exact import EXACT
from support.failing import fails
from support.launching import sketch_of
from support.marks import slow
from support.paths import EXAMPLES
from support.small_net import local_grads, local_weights

CODECS: dict[str, dict[str, Any]] = {
    "bfloat16": {"kind": "dense", "wire": "bfloat16"},
    "quantized": {"kind": "quantized", "bits": 4, "block": 32},
    "quantized lead": {"kind": "quantized", "bits": 4, "block": 32},
    "sketch": {"kind": "sketch", "density": 0.3},
    "sketch shared": {"kind": "sketch", "density": 0.9, "support": "shared", "symbol": "int32x1"},
}
WITH_RESIDUAL = [name for name in CODECS if name != "bfloat16"]


def policy(codec: str, *directions: str) -> dict[str, Any]:
    feedback = {"kind": "none" if codec == "bfloat16" else "residual"}
    if codec == "quantized lead":
        feedback["lead"] = 0.5  # type: ignore[assignment]
    rule = {"when": {"name": "*"}, "codec": CODECS[codec], "feedback": feedback}
    return {"schema": 1} | {direction: [rule] for direction in directions or ("gradients",)}


def residuals(model: Any) -> list[Tensor]:
    found = (r.residuals for r in tagc.compressor(model).reducers)
    return [residual.clone() for by_column in found for residual in by_column.values()]


# Ranks that stop


def impatient(seconds: float = 1.0) -> DeviceMesh:
    """All ranks, in a group of their own that soon gives up."""
    group: Any = dist.new_group(timeout=timedelta(seconds=seconds))
    return DeviceMesh.from_group(group, "cpu")


PARAMETERS = {
    "schema": 1,
    "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
    "parameters": [{"when": {"name": "*.weight"}, "codec": CODECS["quantized"] | {"bits": 8}}],
}
STOPPED: tuple[tuple[Any, str], ...] = (
    ("dense", "reduction of gradients of unit 'blocks.1'"),
    (policy("sketch"), "reduction of gradients of unit 'blocks.1'"),
    (PARAMETERS, "gathering of parameters of unit '(root)'"),
)


@on_ranks(3)
def test_a_rank_that_stops_answering(rank: int, world_size: int) -> None:
    for spec, where in STOPPED:
        wrap(sharded(net()), spec)  # compiles kernels, before anybody is impatient
        model = wrap(sharded(net(), mesh=impatient(), reshard_after_forward=False), spec)
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
        model = sharded(net(), mesh=mesh["shard"])
        here = how if rank == bad else ""
        spec: Any = "mlp-onli" if here == "policy" else policy("quantized", "gradients")
        ops = "cqu" if here == "ops" else None
        if here == "model":
            model.requires_grad_(False)
        call = partial(wrap, model, spec, replicas=mesh["replicate"], ops=ops)
        kind, text = fails(call)
        if here:
            assert kind in ("PolicyError", "ValueError"), text
        else:
            assert (kind, "tagc.wrap failed on rank" in text) == ("RuntimeError", True), text
    wrap(sharded(net(), mesh=mesh["shard"]), replicas=mesh["replicate"])


# Gradients that are not finite


@pytest.mark.some(2)
@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "codec"),
    [*product((3,), CODECS), *((4, name) for name in CODECS if "shared" not in name)],
)
def test_everyone_learns_of_a_loss_that_overflows(rank: int, world_size: int, codec: str) -> None:
    """Every owner, and with four ranks every replica."""
    model = sharded(net())
    spec, options = policy(codec), {}
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(net(), mesh=mesh["shard"])
        spec, options = policy(codec, "gradients", "replicas"), {"replicas": mesh["replicate"]}
    wrap(model, spec, **options)
    for step in range(3):
        factor = math.inf if step == 1 and rank == world_size - 2 else 1.0
        (loss_of(model, rank, step) * factor).backward()
        # (A rank may own nothing of a small parameter.)
        grads = [g for g in local_grads(model).values() if g.numel()]
        assert all(bool(g.isfinite().all()) == (step != 1) for g in grads)
        assert all(bool(r.isfinite().all()) for r in residuals(model))
        model.zero_grad()


# Skipped steps and loss scales


@on_ranks(2)
@pytest.mark.parametrize(
    "codec", [c if c in ("quantized lead", "sketch") else slow(c) for c in WITH_RESIDUAL]
)
def test_residuals_follow_the_loss_scale(rank: int, world_size: int, codec: str) -> None:
    """Scales are powers of two, so unscaled gradients have the bits of a run without a scale."""
    scales = (1.0, 4.0, 4.0, 0.5)
    runs = []
    for scaled in (False, True):
        model = wrap(sharded(net()), policy(codec))
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
    model = wrap(sharded(net()), policy("quantized"))
    for factor in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            tagc.compressor(model).scale_residuals(factor)
    head = {"when": {"name": "head.*"}, "codec": CODECS["quantized"]}
    other = wrap(sharded(net()), {"schema": 1, "gradients": [head]})
    with pytest.raises(ValueError, match="not taken from this model"):
        tagc.compressor(model).restore_residuals(tagc.compressor(other).copy_residuals())


def loss_scaling() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    import loss_scaling  # pyright: ignore[reportMissingImports]

    return loss_scaling


@on_ranks(2)
def test_a_loss_scaler_end_to_end(rank: int, world_size: int) -> None:
    """The example's loop, with a scale that overflows at first, beside native FSDP."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    spec = policy("quantized")
    spec["gradients"][0]["codec"] = {"kind": "sketch", "density": 1.0, "symbol": "int32x1"}
    results, scales = [], []
    for chosen in ("dense", spec):  # 'dense' owes nothing, so the same loop is the native one
        model = wrap(sharded(net(), mp_policy=mixed), chosen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        seen = [2.0**20]
        for step in range(14):
            losses = [partial(loss_of, model, rank, step % 3)]
            loss_scaling().train(model, optimizer, scaler, losses)
            seen.append(scaler.get_scale())
        scales.append(seen)
        results.append(local_weights(model))
        assert all(bool(r.isfinite().all()) for r in residuals(model))
    steps = list(pairwise(scales[0]))
    assert sum(b < a for a, b in steps) >= 2
    assert any(b > a for a, b in steps)
    assert scales[1] == scales[0]
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, scales)
    assert all(other == scales for other in everyones)
    for name, weight in results[1].items():
        torch.testing.assert_close(weight, results[0][name], rtol=0.02, atol=2e-3)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
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


NUMBER = {"kind": "residual"}
MEASURED = {"kind": "residual", "lead": "measured"}
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "measured": ({"kind": "matrix", "bits": 1, "level": 1.3}, MEASURED),
    "stochastic": (
        {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"},
        {"kind": "none"},
    ),
    "sketch": ({"kind": "sketch", "density": 0.3}, NUMBER),
    "shared": (
        {"kind": "sketch", "density": 0.9, "support": "shared", "symbol": "int32x1"},
        NUMBER,
    ),
}


def wrapped(rule: str) -> Any:
    codec, feedback = RULES[rule]
    when = {"name": "*weight", "min_numel": 40} if rule == "measured" else {"name": "*"}
    return wrap(
        sharded(net()),
        {"schema": 1, "gradients": [{"when": when, "codec": codec, "feedback": feedback}]},
    )


def grads_of(model: Any, rank: int, step: int, factor: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    (loss_of(model, rank, step) * factor).backward()
    return local_grads(model)


@pytest.mark.some(2)
@on_ranks(2)
@pytest.mark.parametrize("rule", ["measured", "stochastic", "sketch", slow("shared")])
@pytest.mark.parametrize("before", [0, 2])
def test_the_next_steps_are_those_without_it(
    rank: int, world_size: int, rule: str, before: int
) -> None:
    """To the bit; also where the very first step is skipped, and what it sent was not finite."""
    model, other = wrapped(rule), wrapped(rule)
    for step in range(before):
        grads_of(model, rank, step)
        grads_of(other, rank, step)
    compressor = tagc.compressor(model)
    copy = compressor.copy_residuals()
    for skipped in (7.0, math.inf if rank == 0 else 1.0):
        grads_of(model, rank, 9, skipped)
        compressor.restore_residuals(copy, where=False)
        compressor.restore_residuals(copy)
    for step in range(before, before + 3):
        mine, its = grads_of(model, rank, step), grads_of(other, rank, step)
        torch.testing.assert_close(mine, its, **EXACT)


@on_ranks(2)
@pytest.mark.parametrize("rule", ["measured", "sketch"])
def test_a_tensor_restores_what_no_host_counts(rank: int, world_size: int, rule: str) -> None:
    """Residuals and measured leads; thresholds keep what they learnt."""
    model = wrapped(rule)
    grads_of(model, rank, 0)
    compressor = tagc.compressor(model)
    copy = compressor.copy_residuals()

    def leads() -> list[Tensor]:
        return [
            tensor.clone()
            for reducer in compressor.reducers
            for name, tensor in reducer.store
            if name.startswith("share.")
        ]

    def thresholds() -> list[Tensor]:
        sketched = (r for r in compressor.reducers if r.programs.sketches is not None)
        return [sketch_of(reducer).threshold.clone() for reducer in sketched]

    first = leads()
    assert bool(first) == (rule == "measured")
    grads_of(model, rank, 1, 7.0)
    after = leads()
    learnt = thresholds()
    assert all(not torch.equal(a, f) for a, f in zip(after, first, strict=True))
    compressor.restore_residuals(copy, where=torch.zeros(()))
    torch.testing.assert_close(leads(), after, **EXACT)
    compressor.restore_residuals(copy, where=torch.ones(()))
    torch.testing.assert_close(leads(), first, **EXACT)
    torch.testing.assert_close(thresholds(), learnt, **EXACT)


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "one rank scales": lambda compressor, rank: rank or compressor.scale_residuals(2.0),
    "by other factors": lambda compressor, rank: compressor.scale_residuals(2.0 + rank),
    "one rank restores": lambda compressor, rank: (
        rank or compressor.restore_residuals(compressor.copy_residuals())
    ),
    "one rank drops": lambda compressor, rank: rank or compressor.drop_waiting(),
}


@on_ranks(2)
@pytest.mark.parametrize("headers", [True, False])
def test_calls_of_one_rank_alone(rank: int, world_size: int, headers: bool) -> None:
    """The next reduction tells all ranks, whatever the backend; a load starts over."""
    for calls in CALLS if headers else ("by other factors", "one rank restores"):
        check_call(rank, calls, headers)


def check_call(rank: int, calls: str, headers: bool) -> None:
    with nullcontext() if headers else as_on_nccl():
        model = wrapped("sketch")
        compressor = tagc.compressor(model)
        grads_of(model, rank, 0)
        compressor.scale_residuals(torch.tensor(2.0))
        grads_of(model, rank, 1)
        state = compressor.state_dict()
        CALLS[calls](compressor, rank)
        compressor.load_state_dict(state)
        grads_of(model, rank, 2)
        CALLS[calls](compressor, rank)
        kind, said = fails(lambda: grads_of(model, rank, 3))
        assert kind == ("DesyncError" if headers else "RuntimeError"), said
        assert "call them on every rank alike" in said

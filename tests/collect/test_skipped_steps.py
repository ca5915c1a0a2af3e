"""Steps that the optimizer skips: undone, they have not been."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import tagc
from parity.model import loss_of
from support.block_net import net, sharded, wrap
from support.distributed import as_on_nccl, on_ranks
from support.exact import EXACT
from support.failing import fails
from support.launching import sketch_of
from support.marks import slow
from support.small_net import local_grads

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

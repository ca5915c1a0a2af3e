"""`tagc.wrap` of ranks that differ, or of which one fails: all of them raise."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

import tagc
from support.distributed import run_ranks
from support.failing import fails
from support.mlp_net import MLP_ONLY, Net, backward, changed, sharded


def told_on_every_rank(odd_one_out: Callable[[], Any], others: Callable[[], Any]) -> list:
    """What each of three ranks is told when rank 1 differs."""
    return run_ranks(_told, 3, odd_one_out, others, timeout=24)


def _told(rank: int, odd_one_out: Callable[[], Any], others: Callable[[], Any]) -> Any:
    return fails(odd_one_out if rank == 1 else others)


def wrap_right() -> None:
    tagc.wrap(sharded(), MLP_ONLY)


def wrap_other_density() -> None:
    tagc.wrap(sharded(), changed(codec={"kind": "sketch", "density": 0.3}))


def wrap_misspelt() -> None:
    """The policy that the environment names, which ranks need not have alike."""
    os.environ["TAGC_POLICY"] = "one-bt"
    try:
        tagc.wrap(sharded())
    finally:
        del os.environ["TAGC_POLICY"]


def wrap_fewer_units() -> None:
    model: Any = fully_shard(Net())
    tagc.wrap(model, MLP_ONLY)


def wrap_frozen() -> None:
    tagc.wrap(sharded().requires_grad_(False), MLP_ONLY)


def wrap_once_and_train() -> None:
    model = tagc.wrap(sharded(), MLP_ONLY)
    backward(model)


def wrap_and_train_misspelt_ops() -> None:
    model = tagc.wrap(sharded(), MLP_ONLY, ops="cqu")
    backward(model)


@pytest.mark.parametrize(
    ("odd_one_out", "what"),
    [
        (wrap_other_density, "policy"),
        (wrap_fewer_units, "plan"),
    ],
)
def test_ranks_that_differ(odd_one_out: Callable, what: str) -> None:
    for kind, said in told_on_every_rank(odd_one_out, wrap_right):
        assert kind == "RuntimeError", said
        assert f"tagc {what} differs between ranks: rank 0 has" in said
        assert "rank 1 has" in said


def test_policy_misspelt_on_one_rank() -> None:
    told = told_on_every_rank(wrap_misspelt, wrap_right)
    assert told[1][0] == "PolicyError"
    assert "did you mean 'one-bit'?" in told[1][1]
    for kind, said in (told[0], told[2]):
        assert kind == "RuntimeError"
        assert "tagc.wrap failed on rank 1: PolicyError" in said
        assert "TAGC_POLICY=one-bt: no built-in policy" in said
        assert "did you mean 'one-bit'?" in said


@pytest.mark.parametrize(
    ("odd_one_out", "others"),
    [
        (wrap_frozen, wrap_right),
        (wrap_and_train_misspelt_ops, wrap_once_and_train),
    ],
)
def test_failure_on_one_rank(odd_one_out: Callable, others: Callable) -> None:
    told = told_on_every_rank(odd_one_out, others)
    assert told[1][0] in ("ValueError", "PolicyError")
    for kind, said in (told[0], told[2]):
        assert kind == "RuntimeError"
        assert "rank 1" in said, said

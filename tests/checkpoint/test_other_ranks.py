"""A state loaded by other ranks, or with another policy: nothing owed is lost, or it is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

import tagc
from support import fsdp1_net, small_net
from support.distributed import on_ranks, run_ranks
from support.states import (
    BFLOAT16,
    LEAD,
    POLICIES,
    QUANTIZED,
    by_saver,
    loads_badly,
    residual_sums,
    rules,
    run,
    train_and_save,
    wrapped,
)


def forces(rank: int, policy: dict, folder: Path) -> tuple[dict[str, Tensor], str]:
    model = wrapped(policy)
    compressor = tagc.compressor(model)
    with pytest.warns(UserWarning, match="dropped") as caught:
        compressor.load(folder, force=True)
    assert len(caught) == 1
    sums = residual_sums(model)
    run(model, rank, range(3, 5))
    return sums, str(caught[0].message)


def totals(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """By name; not every rank has something of every small parameter's average."""
    names = dict.fromkeys(name for of in ranks for name in of)
    return {name: torch.stack([of[name] for of in ranks if name in of]).sum(0) for name in names}


def goes_on_warming_up(rank: int, folder: Path) -> None:
    model = wrapped(POLICIES["warming up"])
    compressor = tagc.compressor(model)
    compressor.load(folder)
    run(model, rank, range(3, 6))
    assert math.isnan(compressor.metrics().density)
    run(model, rank, range(6, 7))
    assert compressor.metrics().density > 0


def test_a_warm_up_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Of 6 steps; 3 were made before."""
    run_ranks(train_and_save, 2, "safetensors", POLICIES["warming up"], tmp_path)
    run_ranks(goes_on_warming_up, 3, tmp_path)


@by_saver
def test_another_policy_is_refused_unless_forced(tmp_path: Path, saver: str) -> None:
    before = totals(run_ranks(train_and_save, 2, saver, POLICIES["quantized residual"], tmp_path))
    other = rules({"kind": "quantized", "bits": 8}, BFLOAT16)
    other["gradients"][0]["when"] = {"name": "second.*"}
    said = run_ranks(loads_badly, 2, "safetensors", other, tmp_path)
    for kind, message in said:
        assert kind == "StateError"
        for policy in (POLICIES["quantized residual"], other):
            assert tagc.Policy.load(policy).hash[:12] in message
        assert "force=True" in message
    if saver == "dcp":
        # torch looks for the names first; they are of the other policy, and the remedy.
        for kind, message in run_ranks(loads_badly, 2, "dcp", other, tmp_path):
            assert kind == "CheckpointException"
            assert f"policy_{tagc.Policy.load(other).hash[:12]}" in message
            assert "load it with tagc.compressor(model).load(folder)" in message
    loaded = run_ranks(forces, 2, other, tmp_path)
    after = totals([sums for sums, _ in loaded])
    for name in ("second.0.weight", "second.2.weight"):
        ranks = torch.stack([sums[name] for sums, _ in loaded])
        assert ((after[name] - before[name]).abs() <= 2.0**-8 * ranks.abs().sum(0) + 1e-37).all()
        assert before[name].any()
    for _, message in loaded:
        for name in ("first.0.weight", "first.2.weight", "head.weight", "norm.weight"):
            assert f"residual of gradients of {name}" in message
        assert "second" not in message


def test_other_ranks_are_told_to_load_the_folder(tmp_path: Path) -> None:
    """torch asks for a part by name; a part of the ranks' residuals must not do."""
    run_ranks(train_and_save, 2, "dcp", POLICIES["quantized residual"], tmp_path)
    for kind, message in run_ranks(loads_badly, 3, "dcp", POLICIES["quantized residual"], tmp_path):
        assert kind == "CheckpointException"
        assert "of_3_ranks" in message
        assert "load it with tagc.compressor(model).load(folder)" in message


def own_files(rank: int, folder: Path, write: bool) -> tuple[str, str]:
    """Every rank keeps its own state dict, by torch.save."""
    file = folder / f"{min(rank, 1)}.pt"
    model = wrapped(POLICIES["quantized residual"])
    if write:
        run(model, rank, range(2))
        torch.save(tagc.compressor(model).state_dict(), file)
        return "", ""
    try:
        tagc.compressor(model).load_state_dict(torch.load(file, weights_only=True))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_state_dicts_are_of_one_rank(tmp_path: Path) -> None:
    run_ranks(own_files, 2, tmp_path, True)
    assert run_ranks(own_files, 2, tmp_path, False) == [("", "")] * 2
    for kind, message in run_ranks(own_files, 3, tmp_path, False):
        assert kind == "StateError"
        assert re.search(r"saved by rank [01] of 2, but this is rank [012] of 3", message)
        assert "load(folder)" in message


KINDS: dict[str, Callable[[], Any]] = {"1": fsdp1_net.sharded, "2": small_net.sharded}


@on_ranks(2)
@pytest.mark.parametrize("kinds", ["11", "21"])
def test_one_rank_does_not_have_what_another_owned(rank: int, world_size: int, kinds: str) -> None:
    """A state dict is of one rank, which need not have owned all that it owns now."""
    model = fsdp1_net.quietly(tagc.wrap, KINDS[kinds[0]](), rules(QUANTIZED, LEAD))
    run(model, rank, range(3))
    state = tagc.compressor(model).state_dict()
    make = otherwise_sharded if kinds == "11" else KINDS[kinds[1]]
    other = fsdp1_net.quietly(tagc.wrap, make(), rules(QUANTIZED, LEAD))
    # Whichever rank finds it out first, the others learn of it.
    with pytest.raises((tagc.StateError, RuntimeError), match=r"elements of|would be dropped"):
        tagc.compressor(other).load_state_dict(state)


def otherwise_sharded() -> Any:
    """FSDP1 with a single unit, which cuts in other places."""
    return FullyShardedDataParallel(small_net.net(), device_id=fsdp1_net.CPU)

"""A state loaded by other ranks, or with another policy: nothing owed is lost, or it is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tagc
from support.distributed import run_ranks
from support.marks import slow
from support.states import (
    BFLOAT16,
    POLICIES,
    by_saver,
    in_turn,
    loads_badly,
    residual_sums,
    rules,
    run,
    train_and_save,
    wrapped,
)


def load_and_train(
    rank: int, policy: dict, folder: Path, force: bool, hosts: int | None = None
) -> tuple[dict[str, Tensor], str]:
    model = wrapped(policy, hosts=hosts)
    compressor = tagc.compressor(model)
    message = ""
    if force:
        with pytest.warns(UserWarning, match="dropped") as caught:
            compressor.load(folder, force=True)
        message = str(caught[0].message)
        assert len(caught) == 1
    else:
        compressor.load(folder)
    sums = residual_sums(model)
    run(model, rank, range(3, 5))
    metrics = compressor.metrics()
    assert metrics.steps == 2
    assert metrics.unresolved == 0
    return sums, message


def totals(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """By name; not every rank has something of every small parameter's average."""
    names = dict.fromkeys(name for of in ranks for name in of)
    return {name: everyones(ranks, name).sum(0) for name in names}


def everyones(ranks: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([of[name] for of in ranks if name in of])


MORE, FEWER = (2, 3), (4, 2)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("old", "new", "policy", "saver"),
    [
        # More ranks and fewer ones in turn, too.
        pytest.param(*ranks, *case.values, marks=case.marks if ranks == usual else pytest.mark.slow)
        for ranks in (MORE, FEWER, (3, 4))
        for i, case in enumerate(
            in_turn(
                [
                    "quantized average",
                    "packed bfloat16",
                    "sketch shared",
                    "packed lead",
                    "matrix lead",
                ]
            )
        )
        for usual in [(MORE, FEWER)[i // 2 % 2]]
    ],
)
def test_the_sum_over_ranks_is_conserved(
    tmp_path: Path, saver: str, policy: str, old: int, new: int
) -> None:
    conserves(tmp_path, saver, policy, (old, None), (new, None))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("policy", "saver"),
    in_turn(["quantized average", "sketch shared", "matrix lead"], rare=["sketch shared"]),
)
@pytest.mark.parametrize(
    ("old", "new"),
    [((4, 2), (3, None)), slow((3, None), (4, 2)), slow((4, 2), (6, 2)), slow((6, 3), (4, 2))],
)
def test_the_sum_over_ranks_is_conserved_on_hosts(
    tmp_path: Path,
    saver: str,
    policy: str,
    old: tuple[int, int | None],
    new: tuple[int, int | None],
) -> None:
    """Ranks, and how many of them share a host."""
    conserves(tmp_path, saver, policy, old, new)


def conserves(
    folder: Path,
    saver: str,
    policy: str,
    old: tuple[int, int | None],
    new: tuple[int, int | None],
) -> None:
    chosen = POLICIES[policy]
    saved = run_ranks(train_and_save, old[0], saver, chosen, folder, old[1])
    before = totals(saved)
    loaded = run_ranks(load_and_train, new[0], chosen, folder, False, new[1])
    ranks = [sums for sums, _ in loaded]
    after = totals(ranks)
    assert set(before) == set(after)
    for name, total in before.items():
        assert total.any()
        # Each new rank rounds its own sum once, by half a unit in the last place at most.
        eps = 2.0**-8 if policy.endswith("bfloat16") else 2.0**-24
        bound = eps * everyones(ranks, name).abs().sum(0) + 1e-37
        assert ((after[name] - total).abs() <= bound).all()
    if new[0] // (new[1] or 1) > old[0] // (old[1] or 1):
        owed = {n: s for n, s in ranks[-1].items() if " of " not in n}
        assert not any(sums.any() for sums in owed.values())


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
    before = totals(run_ranks(train_and_save, 2, saver, POLICIES["packed"], tmp_path))
    other = rules({"kind": "quantized", "bits": 8}, BFLOAT16)
    other["gradients"][0]["when"] = {"name": "second.*"}
    said = run_ranks(loads_badly, 2, "safetensors", other, tmp_path)
    for kind, message in said:
        assert kind == "StateError"
        for policy in (POLICIES["packed"], other):
            assert tagc.Policy.load(policy).hash[:12] in message
        assert "force=True" in message
    if saver == "dcp":
        # torch looks for the names first; they are of the other policy, and the remedy.
        for kind, message in run_ranks(loads_badly, 2, "dcp", other, tmp_path):
            assert kind == "CheckpointException"
            assert f"policy_{tagc.Policy.load(other).hash[:12]}" in message
            assert "load it with tagc.compressor(model).load(folder)" in message
    loaded = run_ranks(load_and_train, 2, other, tmp_path, True)
    after = totals([sums for sums, _ in loaded])
    for name in ("second.0.weight", "second.2.weight"):
        ranks = torch.stack([sums[name] for sums, _ in loaded])
        assert ((after[name] - before[name]).abs() <= 2.0**-8 * ranks.abs().sum(0) + 1e-37).all()
        assert before[name].any()
    for _, message in loaded:
        for name in ("first.0.weight", "first.2.weight", "head.weight", "norm.weight"):
            assert f"residual of gradients of {name}" in message
        assert "second" not in message


@by_saver
def test_one_rank_has_no_use_for_residuals(tmp_path: Path, saver: str) -> None:
    run_ranks(train_and_save, 2, saver, POLICIES["packed"], tmp_path)
    ((kind, message),) = run_ranks(loads_alone, 1, tmp_path)
    assert kind == "StateError"
    assert "would be dropped" in message
    assert "force=True" in message


def loads_alone(rank: int, folder: Path) -> tuple[str, str]:
    with pytest.warns(UserWarning, match="world size 1"):
        model = wrapped(POLICIES["packed"])
    compressor = tagc.compressor(model)
    with pytest.raises(tagc.StateError) as caught:
        compressor.load(folder)
    with pytest.warns(UserWarning, match="dropped the saved residual"):
        compressor.load(folder, force=True)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_ranks_are_told_to_load_the_folder(tmp_path: Path, ranks: int) -> None:
    """torch asks for a part by name; a part of the ranks' residuals must not do."""
    old = 5 - ranks
    run_ranks(train_and_save, old, "dcp", POLICIES["packed"], tmp_path)
    for kind, message in run_ranks(loads_badly, ranks, "dcp", POLICIES["packed"], tmp_path):
        assert kind == "CheckpointException"
        assert f"of_{ranks}_ranks" in message
        assert "load it with tagc.compressor(model).load(folder)" in message


def own_files(rank: int, folder: Path, write: bool) -> tuple[str, str]:
    """Every rank keeps its own state dict, by torch.save."""
    file = folder / f"{min(rank, 1)}.pt"
    model = wrapped(POLICIES["packed"])
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

"""FSDP2 on top of tensor parallelism: what is saved, resumed, and handed to other meshes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.distributed import on_ranks, run_ranks
from support.exact import equal
from support.marks import slow
from support.parallel_net import SHAPES, loss_of, parallel
from support.small_net import local_weights
from support.states import (
    LEAD,
    MATRIX,
    PACKED,
    QUANTIZED,
    SKETCH,
    in_turn,
    in_whole,
    load,
    save,
    set_weights,
    shared_folder,
    snapshot,
    wrapped,
)
from tagc.checkpoint import to_state_dict
from tagc.checkpoint.suffix import split_suffix


def rules(codec: dict[str, Any], feedback: dict[str, Any] | None = None, **more: Any) -> dict:
    names = ["mlp.*", "head.weight"] if codec["kind"] == "matrix" else ["*.weight"]
    rule: dict[str, Any] = {"when": {"name": names}, "codec": codec}
    rule |= {} if feedback is None else {"feedback": feedback}
    return {"schema": 1, "gradients": [rule], **more}


CHANGES = {"when": {"name": ["mlp.*", "head.weight"]}, "codec": {"kind": "delta", "bits": 4}}
POLICIES = {
    "quantized": rules(QUANTIZED, {"kind": "residual"}),
    "quantized lead": rules(QUANTIZED, LEAD),
    "quantized dithered": rules(QUANTIZED | {"rounding": "stochastic"}),
    "quantized none": rules(QUANTIZED, {"kind": "none"}),
    "matrix lead": rules(MATRIX, LEAD),
    "packed": rules(PACKED),
    "sketch": rules(SKETCH),
    "changes": rules(QUANTIZED, parameters=[CHANGES]),
}


def run(model: Any, data: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        loss_of(model, data, step).backward()
        optimizer.step()
        optimizer.zero_grad()


Owed = dict[str, tuple[int, Tensor]]


def owed(model: Any) -> Owed:
    """This rank's residuals, and what it keeps as an owner, in the parameter's shape; and which of
    the duplicates it has."""
    found: Owed = {}
    for full, tensor in tagc.compressor(model).state_dict().items():
        name = full.split(".", 4)[-1]
        kind = name.split(".")[0]
        if kind in ("residual", "sent"):
            parameter, whole = in_whole(name.split(".", 2)[2], tensor, SHAPES)
            duplicate = split_suffix(name)[1].duplicate or (0, 1)
            found[f"{kind} {parameter}"] = duplicate[0], whole
    return found


def totals(ranks: list[Owed]) -> dict[str, list[Tensor]]:
    """The sums over ranks, for each duplicate."""
    sums: dict[str, dict[int, Tensor]] = {}
    for of in ranks:
        for name, (duplicate, whole) in of.items():
            by_duplicate = sums.setdefault(name, {})
            by_duplicate[duplicate] = by_duplicate.get(duplicate, 0) + whole
    return {name: [found[i] for i in sorted(found)] for name, found in sums.items()}


# The same ranks


@pytest.mark.some(4)
@on_ranks(4)
@pytest.mark.parametrize(
    ("policy", "saver"),
    in_turn(POLICIES, rare=["quantized dithered", "quantized none", "packed", "sketch"]),
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    rank: int, world_size: int, saver: str, policy: str
) -> None:
    resumes(rank, saver, *(wrapped(POLICIES[policy], parallel(2, 2)) for _ in range(2)))


@pytest.mark.slow
@on_ranks(8)
@pytest.mark.parametrize(("feedback", "saver"), in_turn([{"kind": "residual"}, LEAD]))
def test_replicas_resume(rank: int, world_size: int, saver: str, feedback: dict[str, Any]) -> None:
    """Native HSDP on top."""
    policy = rules(QUANTIZED, feedback)
    policy["replicas"] = policy["gradients"]
    resumes(rank, saver, *(wrapped(policy, parallel(2, 2, replicas=2)) for _ in range(2)))


def resumes(rank: int, saver: str, model: Any, resumed: Any) -> None:
    """Train, save, go on; and the same with another model that loads what was saved."""
    run(model, rank // 2, range(3))
    with shared_folder() as folder:
        save(model, folder, saver)
        if saver == "safetensors":
            ranks = json.loads((folder / "tagc.json").read_text())["ranks"]
            assert ranks == [*range(dist.get_world_size())]
        set_weights(resumed, local_weights(model))
        load(resumed, folder, saver)
    run(model, rank // 2, range(3, 5))
    run(resumed, rank // 2, range(3, 5))
    equal(snapshot(resumed), snapshot(model))


@on_ranks(4)
def test_a_residual_is_of_this_ranks_part(rank: int, world_size: int) -> None:
    """What is not sent in the first step is the gradient itself."""
    alone = parallel(4, 1)
    model = wrapped(rules(PACKED), parallel(2, 2))
    # The gradient of one rank's data: it does not matter which rank has which rows of it.
    whole = {}
    for data in range(2):
        loss_of(alone, data, 0).backward()
        for name, parameter in alone.named_parameters():
            grad: Any = parameter.grad
            whole[name, data] = grad.full_tensor().double()
        alone.zero_grad()
    loss_of(model, rank // 2, 0).backward()
    for name, (_, residual) in owed(model).items():
        here = residual != 0
        grad = whole[name.removeprefix("residual "), rank // 2][here]
        alike = torch.isclose(residual[here], grad, rtol=1e-5, atol=1e-6)
        assert 0.5 < alike.float().mean() < 1, name
    names = {n.split(".", 4)[-1] for n in tagc.compressor(model).state_dict() if "residual." in n}
    first, last = [(0, 7), (7, 13)][rank % 2]
    assert names == {
        f"residual.gradients.mlp.up.weight.box_{first}_0_to_{last}_6",
        f"residual.gradients.mlp.down.weight.box_0_{first}_to_7_{last}",
        f"residual.gradients.norm.weight.duplicate_{rank % 2}_of_2",
        f"residual.gradients.head.weight.duplicate_{rank % 2}_of_2",
    }


# Other meshes


def train_and_save(
    rank: int, mesh: tuple[int, int], policy: str, saver: str, folder: Path
) -> tuple[Owed, Owed]:
    model = wrapped(POLICIES[policy], parallel(*mesh))
    run(model, rank // mesh[1], range(3))
    save(model, folder, saver)
    return owed(model), {}


def load_and_train(
    rank: int, mesh: tuple[int, int], policy: str, saver: str, folder: Path
) -> tuple[Owed, Owed]:
    model = wrapped(POLICIES[policy], parallel(*mesh))
    tagc.compressor(model).load(folder)
    loaded = owed(model)
    run(model, rank // mesh[1], range(3, 4))
    assert tagc.compressor(model).metrics().steps == 1
    return loaded, owed(model)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("old", "new", "policy", "saver"),
    [
        ((2, 2), (4, 1), "quantized", "safetensors"),
        ((4, 1), (2, 2), "matrix lead", "dcp"),
        ((2, 1), (2, 2), "quantized lead", "safetensors"),
        slow((2, 2), (2, 1), "sketch", "dcp"),
        slow((2, 2), (3, 1), "quantized lead", "dcp"),
        slow((3, 1), (2, 2), "packed", "safetensors"),
        slow((2, 3), (3, 2), "matrix lead", "safetensors"),
        slow((3, 2), (2, 2), "quantized", "dcp"),
    ],
)
def test_the_sum_over_ranks_is_conserved(
    tmp_path: Path, old: tuple[int, int], new: tuple[int, int], policy: str, saver: str
) -> None:
    saved = run_ranks(train_and_save, old[0] * old[1], old, policy, saver, tmp_path)
    loaded = run_ranks(load_and_train, new[0] * new[1], new, policy, saver, tmp_path)
    before, after = (totals([first for first, _ in ranks]) for ranks in (saved, loaded))
    assert before.keys() == after.keys()
    for name, (exact, *_) in before.items():
        assert exact.any()
        size = totals([{n: (d, t.abs()) for n, (d, t) in of.items()} for of, _ in loaded])[name][0]
        for total in after[name]:
            assert ((total - exact).abs() <= 2.0**-24 * size + 1e-37).all(), name
    for name, found in after.items():
        assert len(found) == (new[1] if "norm" in name or "head" in name else 1)
        # Tensor-parallel ranks begin alike.
        for total in found[1:]:
            assert torch.equal(total, found[0]), name


def loads_on_one_data_rank(rank: int, folder: Path) -> str:
    model = parallel(1, 4)
    with pytest.warns(UserWarning, match="does nothing at world size 1"):
        wrapped(POLICIES["quantized"], model)
    with pytest.raises(tagc.StateError) as caught:
        tagc.compressor(model).load(folder)
    with pytest.warns(UserWarning, match="dropped the saved residual"):
        tagc.compressor(model).load(folder, force=True)
    tagc.compressor(model).save(folder)
    return str(caught.value)


def test_one_data_rank_has_no_use_for_residuals(tmp_path: Path) -> None:
    run_ranks(train_and_save, 4, (2, 2), "quantized", "safetensors", tmp_path)
    for said in run_ranks(loads_on_one_data_rank, 4, tmp_path):
        assert "residual of gradients of mlp.up.weight" in said
        assert "would be dropped" in said


@on_ranks(4)
def test_a_state_dict_is_of_one_part(rank: int, world_size: int) -> None:
    """The same ranks in another mesh would each add up something else."""
    states = {}
    for mesh in ((2, 2), (4, 1)):
        model = wrapped(POLICIES["quantized"], parallel(*mesh))
        run(model, rank // mesh[1], range(1))
        states[mesh] = tagc.compressor(model).state_dict()
        if mesh == (2, 2):
            tagc.compressor(model).load_state_dict(states[mesh])
    before = snapshot(model)
    with pytest.raises(tagc.StateError, match="tensor parallelism gave this rank another part"):
        tagc.compressor(model).load_state_dict(states[2, 2])
    equal(snapshot(model), before)


@on_ranks(4)
def test_states_of_before_said_nothing_of_duplicates(rank: int, world_size: int) -> None:
    """What could be saved with tensor parallelism were parameters that it does not divide."""
    policy = rules(QUANTIZED)
    policy["gradients"][0]["when"] = {"name": ["head.weight", "norm.weight"]}
    model, resumed = (wrapped(policy, parallel(2, 2)) for _ in range(2))
    run(model, rank // 2, range(2))
    compressor = tagc.compressor(model)
    state = compressor.state_dict()
    tensors = {name.split(".", 4)[-1]: tensor for name, tensor in [*state.items()][1:]}
    former = {name.replace(f".duplicate_{rank % 2}_of_2", ""): t for name, t in tensors.items()}
    assert former.keys() != tensors.keys()
    header = replace(compressor._state().header(), parts="")
    tagc.compressor(resumed).load_state_dict(to_state_dict(header, former))
    equal(tagc.compressor(resumed).state_dict(), state)


@on_ranks(4)
def test_a_mesh_in_another_order_is_another_layout(rank: int, world_size: int) -> None:
    """All sizes are the same, but ranks 1 and 2 have each other's parts."""
    model = wrapped(POLICIES["quantized"], parallel(2, 2))
    other = wrapped(POLICIES["quantized"], parallel(2, 2, tensor_first=True))
    run(model, rank // 2, range(2))
    with shared_folder() as folder:
        tagc.compressor(model).save(folder)
        tagc.compressor(other).load(folder)
    said: list[Any] = [None] * world_size
    dist.all_gather_object(said, (owed(model), owed(other)))
    before, after = (totals(list(ranks)) for ranks in zip(*said, strict=True))
    equal(after, {name: [found[0]] * len(found) for name, found in before.items()})

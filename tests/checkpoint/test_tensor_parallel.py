"""FSDP2 on top of tensor parallelism: what is saved, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tagc
from support.distributed import on_ranks, run_ranks
from support.exact import equal
from support.layouts import Layout, kept, totals
from support.parallel_net import SHAPES, loss_of, parallel
from support.states import (
    QUANTIZED,
    SKETCH,
    shared_folder,
    snapshot,
    wrapped,
)
from tagc.checkpoint import to_state_dict

TWO_BY_TWO = Layout(2, tensor=2)


def policy(codec: dict[str, Any] = QUANTIZED) -> dict[str, Any]:
    """One codec for all weights."""
    feedback = {"kind": "residual"}
    rule = {"when": {"name": "*.weight"}, "codec": codec, "feedback": feedback}
    return {"schema": 1, "gradients": [rule]}


@on_ranks(4)
def test_a_residual_is_of_this_ranks_part(rank: int, world_size: int) -> None:
    """What is not sent in the first step is the gradient itself."""
    alone = parallel(4, 1)
    model = TWO_BY_TWO.wrapped(policy(SKETCH | {"symbol": "int32x1"}))
    # The gradient of one rank's data: it does not matter which rank has which rows of it.
    whole = {}
    for data in range(2):
        loss_of(alone, data, 0).backward()
        for name, parameter in alone.named_parameters():
            grad: Any = parameter.grad
            whole[name, data] = grad.full_tensor().double()
        alone.zero_grad()
    loss_of(model, rank // 2, 0).backward()
    for name, (_, residual) in kept(model, SHAPES).items():
        here = residual != 0
        grad = whole[name.removeprefix("residual.gradients."), rank // 2][here]
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


def saves(rank: int, folder: Path) -> None:
    model = TWO_BY_TWO.wrapped(policy())
    TWO_BY_TWO.run(model, rank, range(1))
    tagc.compressor(model).save(folder)


def loads_on_one_data_rank(rank: int, folder: Path) -> str:
    model = parallel(1, 4)
    with pytest.warns(UserWarning, match="does nothing at world size 1"):
        wrapped(policy(), model)
    with pytest.raises(tagc.StateError) as caught:
        tagc.compressor(model).load(folder)
    with pytest.warns(UserWarning, match="dropped the saved residual"):
        tagc.compressor(model).load(folder, force=True)
    tagc.compressor(model).save(folder)
    return str(caught.value)


def test_one_data_rank_has_no_use_for_residuals(tmp_path: Path) -> None:
    run_ranks(saves, 4, tmp_path)
    for said in run_ranks(loads_on_one_data_rank, 4, tmp_path):
        assert "residual of gradients of mlp.up.weight" in said
        assert "would be dropped" in said


@on_ranks(4)
def test_a_state_dict_is_of_one_part(rank: int, world_size: int) -> None:
    """The same ranks in another mesh would each add up something else."""
    states = []
    for layout in (TWO_BY_TWO, Layout(4, tensor=1)):
        model = layout.wrapped(policy())
        layout.run(model, rank, range(1))
        states.append(tagc.compressor(model).state_dict())
    before = snapshot(model)
    with pytest.raises(tagc.StateError, match="tensor parallelism gave this rank another part"):
        tagc.compressor(model).load_state_dict(states[0])
    equal(snapshot(model), before)


@on_ranks(4)
def test_states_of_before_said_nothing_of_duplicates(rank: int, world_size: int) -> None:
    """What could be saved with tensor parallelism were parameters that it does not divide."""
    undivided = policy()
    undivided["gradients"][0]["when"] = {"name": ["head.weight", "norm.weight"]}
    model, resumed = (TWO_BY_TWO.wrapped(undivided) for _ in range(2))
    TWO_BY_TWO.run(model, rank, range(2))
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
    model = TWO_BY_TWO.wrapped(policy())
    other = wrapped(policy(), parallel(2, 2, tensor_first=True))
    TWO_BY_TWO.run(model, rank, range(2))
    with shared_folder() as folder:
        tagc.compressor(model).save(folder)
        tagc.compressor(other).load(folder)
    said: list[Any] = [None] * world_size
    dist.all_gather_object(said, (kept(model, SHAPES), kept(other, SHAPES)))
    before, after = (totals(list(ranks)) for ranks in zip(*said, strict=True))
    equal(after, {name: [found[0]] * len(found) for name, found in before.items()})

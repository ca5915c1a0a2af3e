"""FSDP2 on top of tensor parallelism: what is saved, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.layouts import Layout, kept
from support.parallel_net import SHAPES, loss_of, parallel
from support.states import (
    QUANTIZED,
    snapshot,
)

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
    model = TWO_BY_TWO.wrapped(policy({"kind": "sketch", "density": 0.1}))
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
        alike = torch.isclose(residual[here], grad, rtol=1e-5, atol=1e-6).float().mean()
        # The norm's are the largest, and sent.
        assert alike < 0.5 if name.endswith("norm.weight") else alike > 0.5, name
    names = {n.split(".", 4)[-1] for n in tagc.compressor(model).state_dict() if "residual." in n}
    first, last = [(0, 7), (7, 13)][rank % 2]
    assert names == {
        f"residual.gradients.mlp.up.weight.box_{first}_0_to_{last}_6",
        f"residual.gradients.mlp.down.weight.box_0_{first}_to_7_{last}",
        f"residual.gradients.norm.weight.duplicate_{rank % 2}_of_2",
        f"residual.gradients.head.weight.duplicate_{rank % 2}_of_2",
    }


# Other meshes


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

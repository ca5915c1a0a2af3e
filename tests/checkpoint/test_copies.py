"""The state of copies that changes are added to (codec ``delta``): each rank saves its own row."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.gathering import recorded
from support.small_net import local_weights, loss_of
from support.states import (
    POLICIES,
    load,
    run,
    save,
    set_weights,
    shared_folder,
    snapshot,
    wrapped,
)
from support.units import gathered
from tagc.collect.copy_gatherer import _warn_of_others


def evaluate(model: Any, rank: int) -> torch.Tensor:
    with torch.no_grad():
        loss = loss_of(model, rank, 100)
    model.reshard()  # FSDP's root keeps its parameters after a forward
    return loss


@on_ranks(4)
def test_a_state_after_an_evaluation(rank: int, world_size: int) -> None:
    """Which has sent what the last step changed: the resumed run sends no change."""
    model, resumed = (wrapped(POLICIES["changes"], hosts=2) for _ in range(2))
    run(model, rank, range(3))
    loss = evaluate(model, rank)
    with shared_folder() as folder:
        save(model, folder, "safetensors")
        set_weights(resumed, local_weights(model))
        load(resumed, folder, "safetensors")
    sent = tagc.compressor(resumed).parameter_wire_bytes
    assert torch.equal(evaluate(resumed, rank), loss)
    # It gathered the others' rows, which is not counted, and nothing else.
    assert tagc.compressor(resumed).parameter_wire_bytes == sent
    for m in (model, resumed):
        run(m, rank, range(3, 6))
    equal(local_weights(resumed), local_weights(model))


@on_ranks(2)
def test_a_running_model_goes_back(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["changes"])
    run(model, rank, range(3))
    weights, state = local_weights(model), tagc.compressor(model).state_dict()
    run(model, rank, range(3, 6))
    expected = snapshot(model)
    tagc.compressor(model).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that other weights were written is no news here
        _warn_of_others.cache_clear()
        set_weights(model, weights)
        run(model, rank, range(3, 6))
    equal(snapshot(model), expected)


@on_ranks(2)
def test_weights_of_another_step_than_the_state(rank: int, world_size: int) -> None:
    """The copy is of the step that was saved, and nothing is due: an error, not old parameters."""
    model, resumed = (wrapped(POLICIES["changes"]) for _ in range(2))
    run(model, rank, range(3))
    evaluate(model, rank)
    with shared_folder() as folder:
        save(model, folder, "dcp")
        load(resumed, folder, "dcp")
    with pytest.raises(RuntimeError, match="changed, but not by an optimizer"):
        evaluate(resumed, rank)


@on_ranks(2)
def test_switched_off_for_a_while(rank: int, world_size: int) -> None:
    """What changes while tagc is disabled nobody is told: parameters go whole afterwards."""
    policy = POLICIES["changes in 2 bits"]
    model = wrapped(policy)
    run(model, rank, range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", "1")
        with pytest.warns(UserWarning, match="TAGC_DISABLE"):
            disabled = wrapped(policy)
    set_weights(disabled, local_weights(model))
    tagc.compressor(disabled).load_state_dict(tagc.compressor(model).state_dict())
    run(disabled, rank, range(3, 6))
    calls: list[Any] = []
    with recorded(calls):
        again = wrapped(policy)
        set_weights(again, local_weights(disabled))
        tagc.compressor(again).load_state_dict(tagc.compressor(disabled).state_dict())
        evaluate(again, rank)
        assert calls
        for _, _, inp, out in calls:
            assert torch.equal(out.view(world_size, -1), gathered(inp))
    assert snapshot(again)

"""State: what is saved, and that training goes on from it as if it had never stopped, also while
tagc is switched off."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.small_net import local_weights, loss_of, sharded, two_by_two
from support.states import (
    POLICIES,
    SKETCH,
    load,
    residual_sums,
    rules,
    run,
    save,
    set_weights,
    shared_folder,
    snapshot,
    wrapped,
)
from tagc.collect.copy_gatherer import _warn_of_others

# What is in a state


@on_ranks(2)
def test_names_shapes_and_metadata(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["sketch"])
    run(model, rank, range(2))
    compressor = tagc.compressor(model)
    assert isinstance(compressor, Stateful)
    state = compressor.state_dict()
    assert all(isinstance(tensor, Tensor) for tensor in state.values())
    policy = compressor.plan().policy
    starts = {re.split(r"(?<=rank_\d)\.", name)[0] for name in state}
    layout = compressor.plan().fingerprint
    assert starts == {f"of_2_ranks.policy_{policy.hash[:12]}.layout_{layout[:12]}.rank_{rank}"}
    shapes = {n: p.shape for n, p in model.named_parameters() if n.endswith("weight")}
    assert {n: t.shape for n, t in residual_sums(model).items()} == shapes
    with shared_folder() as folder:
        compressor.save(folder)
        (file,) = folder.glob(f"rank-0000{rank}-of-00002-*.safetensors")
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            assert set(opened.keys()) == {re.split(r"rank_\d\.", n)[1] for n in list(state)[1:]}
        assert (metadata["policy_hash"], metadata["layout"]) == (policy.hash, layout)
        assert (metadata["step"], metadata["rank"], metadata["world_size"]) == ("2", str(rank), "2")
        assert metadata["version"] == tagc.__version__
    with shared_folder() as folder:
        before = compressor.state_dict()
        dcp.save({"app": {"comm": before}}, checkpoint_id=folder)
        run(model, rank, range(1))
        compressor.load(folder, key="app.comm")
        equal(compressor.state_dict(), before)


# Copies that changes are added to (codec `delta`): each rank saves its own row


def evaluate(model: Any, rank: int) -> torch.Tensor:
    with torch.no_grad():
        loss = loss_of(model, rank, 100)
    model.reshard()  # FSDP's root keeps its parameters after a forward
    return loss


@on_ranks(2)
def test_a_state_after_an_evaluation(rank: int, world_size: int) -> None:
    """Which has sent what the last step changed: the resumed run sends no change. With weights of
    another step that is an error, not old parameters."""
    model, resumed, other = (wrapped(POLICIES["changes"]) for _ in range(3))
    run(model, rank, range(3))
    loss = evaluate(model, rank)
    with shared_folder() as folder:
        save(model, folder, "dcp")
        set_weights(resumed, local_weights(model))
        for saved in (resumed, other):
            load(saved, folder, "dcp")
    sent = tagc.compressor(resumed).parameter_wire_bytes
    assert torch.equal(evaluate(resumed, rank), loss)
    # It gathered the others' rows, which is not counted, and nothing else.
    assert tagc.compressor(resumed).parameter_wire_bytes == sent
    for m in (model, resumed):
        run(m, rank, range(3, 5))
    equal(local_weights(resumed), local_weights(model))
    with pytest.raises(RuntimeError, match="changed, but not by an optimizer"):
        evaluate(other, rank)


@on_ranks(2)
def test_a_running_model_goes_back(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["changes"])
    run(model, rank, range(3))
    weights, state = local_weights(model), tagc.compressor(model).state_dict()
    run(model, rank, range(3, 5))
    expected = snapshot(model)
    tagc.compressor(model).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that other weights were written is no news here
        _warn_of_others.cache_clear()
        set_weights(model, weights)
        run(model, rank, range(3, 5))
    equal(snapshot(model), expected)


# TAGC_DISABLE: training is native, and state is kept


@on_ranks(2)
def test_disabled_is_native_and_keeps_state(rank: int, world_size: int) -> None:
    policy = POLICIES["sketch"]
    model = wrapped(policy)
    run(model, rank, range(2))
    state = tagc.compressor(model).state_dict()
    native = sharded()
    run(native, rank, range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", "1")
        with pytest.warns(UserWarning, match="TAGC_DISABLE=1: tagc compresses nothing; unset it"):
            disabled = wrapped(policy)
        with pytest.raises(tagc.PolicyError):
            wrapped(rules({"kind": "nonsense"}))
    compressor = tagc.compressor(disabled)
    compressor.load_state_dict(state)
    run(disabled, rank, range(3))
    equal(local_weights(disabled), local_weights(native))
    equal(compressor.state_dict(), state)
    assert compressor.plan().rows == tagc.compressor(model).plan().rows


@on_ranks(4)
def test_disabled_still_averages_over_replicas(rank: int, world_size: int) -> None:
    rule = {"when": {"name": "*.weight"}, "codec": SKETCH}
    model, replicas = two_by_two()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", "1")
        with pytest.warns(UserWarning, match="TAGC_DISABLE"):
            wrapped({"schema": 1, "gradients": [rule]}, model, replicas=replicas)
    dense, replicas = two_by_two()
    tagc.wrap(dense, "dense", replicas=replicas)
    run(model, rank, range(2))
    run(dense, rank, range(2))
    equal(local_weights(model), local_weights(dense))

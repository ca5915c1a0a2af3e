"""TAGC_DISABLE and `remove`: training is native, and state is kept."""

from __future__ import annotations

import pytest

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.replicated_net import two_by_two
from support.small_net import local_weights, sharded
from support.states import (
    POLICIES,
    SKETCH,
    rules,
    run,
    wrapped,
)


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
    compressor.remove()

    fresh = sharded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", "1")
        with pytest.warns(UserWarning, match="TAGC_DISABLE"):
            wrapped(POLICIES["parameters"], fresh)
    run(fresh, rank, range(2))
    metrics = tagc.compressor(fresh).metrics()
    assert metrics.steps == metrics.wire_bytes == metrics.parameter_wire_bytes == 0
    assert metrics.parameter_error == metrics.residual_norm == 0


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
    run(model, rank, range(3))
    run(dense, rank, range(3))
    equal(local_weights(model), local_weights(dense))


@on_ranks(2)
def test_ranks_must_agree_on_the_switch(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAGC_DISABLE", str(rank))
        with pytest.raises(RuntimeError, match=r"TAGC_DISABLE=0, rank 1 has TAGC_DISABLE=1"):
            wrapped(POLICIES["sketch"])
        patch.setenv("TAGC_DISABLE", "yes")
        with pytest.raises(ValueError, match="TAGC_DISABLE is 'yes'"):
            wrapped(POLICIES["sketch"])

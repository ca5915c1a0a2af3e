"""State of FSDP1 models, whose shards cut parameters anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

import tagc
from support.distributed import on_ranks, run_ranks
from support.exact import EXACT
from support.fsdp1_net import CPU, local_weights, quietly, sharded
from support.marks import slow
from support.small_net import net
from support.small_net import sharded as fsdp2_sharded
from support.states import POLICIES, load, residual_sums, run, save, shared_folder
from support.units import policy

# A segment of everything is FSDP1's own buffer; of some parameters it is rearranged.
RULES: Any = {
    "whole": policy(({"name": "*"}, 0.3)),
    "some": POLICIES["quantized average"],
    "packed": POLICIES["packed bfloat16"],
    "lead": POLICIES["packed lead"],
    "whole lead": {
        "schema": 1,
        "gradients": [
            {
                "when": {"min_numel": 1},
                "codec": {"kind": "packed", "density": 0.3},
                "feedback": {"kind": "residual", "lead": 0.4},
            }
        ],
    },
}


@pytest.mark.some(2)
@on_ranks(2, slow(3))
@pytest.mark.parametrize(
    ("rules", "saver"),
    [
        *((rules, "safetensors") for rules in [*RULES][::2]),
        *(slow(rules, "safetensors") for rules in [*RULES][1::2]),
        slow("whole", "dcp"),
        ("lead", "dcp"),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    rank: int, world_size: int, saver: str, rules: str
) -> None:
    model = quietly(tagc.wrap, sharded(use_orig_params=True), RULES[rules])
    run(model, rank, range(3))
    with shared_folder() as folder:
        save(model, folder, saver)
        weights = local_weights(model)
        run(model, rank, range(3, 6))
        ends = []
        for loads in (True, False):
            other = quietly(tagc.wrap, sharded(use_orig_params=True), RULES[rules])
            run(other, rank, range(1))  # so that there is something to replace
            with torch.no_grad():
                for name, parameter in local_weights_of(other).items():
                    parameter.copy_(weights[name])
            if loads:
                load(other, folder, saver)
            run(other, rank, range(3, 6))
            ends.append(local_weights(other))
    torch.testing.assert_close(ends[0], local_weights(model), **EXACT)
    assert any(not torch.equal(ends[1][name], ends[0][name]) for name in ends[0])


def local_weights_of(model: Any) -> dict[str, Tensor]:
    """The parameters themselves, by the names of `local_weights`."""
    return dict(zip(local_weights(model), model.parameters(), strict=True))


KINDS: dict[str, Callable[[], Any]] = {"1": sharded, "2": fsdp2_sharded}


def train_and_save(
    rank: int, folder: Path, rules: str, make: Callable[[], Any] = sharded
) -> dict[str, Tensor]:
    model = quietly(tagc.wrap, make(), RULES[rules])
    run(model, rank, range(3))
    save(model, folder, "safetensors")
    return residual_sums(model)


def load_and_train(
    rank: int, folder: Path, rules: str, make: Callable[[], Any] = sharded
) -> dict[str, Tensor]:
    model = quietly(tagc.wrap, make(), RULES[rules])
    tagc.compressor(model).load(folder)
    sums = residual_sums(model)
    run(model, rank, range(3, 5))
    return sums


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("rules", "old", "new"),
    [
        slow("whole", 2, 3),
        slow("some", 4, 2),
        ("lead", 2, 3),
        ("whole lead", 4, 2),
        ("lead", 3, 2),
    ],
)
def test_the_sum_over_ranks_is_conserved(tmp_path: Path, rules: str, old: int, new: int) -> None:
    before = run_ranks(train_and_save, old, tmp_path, rules)
    check_sums(before, run_ranks(load_and_train, new, tmp_path, rules))


@pytest.mark.parametrize(
    ("rules", "ends", "old", "new"),
    [
        ("lead", "12", 2, 3),
        slow("lead", "21", 3, 2),
        slow("whole lead", "12", 3, 3),
        ("whole lead", "21", 2, 3),
    ],
)
def test_fsdp1_and_fsdp2_go_on_where_the_other_was(
    tmp_path: Path, rules: str, ends: str, old: int, new: int
) -> None:
    """Also with what an owner keeps, of which they cut parameters differently."""
    before = run_ranks(train_and_save, old, tmp_path, rules, KINDS[ends[0]])
    after = run_ranks(load_and_train, new, tmp_path, rules, KINDS[ends[1]])
    assert any(name.startswith("sent of ") for name in after[0])
    check_sums(before, after)


@on_ranks(2)
@pytest.mark.parametrize("kinds", ["11", "12", "21"])
def test_one_rank_does_not_have_what_another_owned(rank: int, world_size: int, kinds: str) -> None:
    """A state dict is of one rank, which need not have owned all that it owns now."""
    model = quietly(tagc.wrap, KINDS[kinds[0]](), RULES["lead"])
    run(model, rank, range(3))
    state = tagc.compressor(model).state_dict()
    make = otherwise_sharded if kinds == "11" else KINDS[kinds[1]]
    other = quietly(tagc.wrap, make(), RULES["lead"])
    # Whichever rank finds it out first, the others learn of it.
    with pytest.raises((tagc.StateError, RuntimeError), match=r"elements of|would be dropped"):
        tagc.compressor(other).load_state_dict(state)


def otherwise_sharded() -> Any:
    """FSDP1 with a single unit, which cuts in other places."""
    return FullyShardedDataParallel(net(), device_id=CPU)


def check_sums(before: list[dict[str, Tensor]], after: list[dict[str, Tensor]]) -> None:
    """Of all ranks' `residual_sums`."""
    # A rank keeps nothing of a parameter of which it owns nothing.
    names = {name for sums in before for name in sums}
    assert names == {name for sums in after for name in sums}
    for name in names:
        total = sum(sums[name] for sums in before if name in sums)
        again = torch.stack([sums[name] for sums in after if name in sums])
        assert torch.as_tensor(total).any()
        # Each new rank rounds its own float32 sum once, by half a unit in the last place at most.
        bound = 2.0**-24 * again.abs().sum(0) + 1e-37
        assert ((again.sum(0) - total).abs() <= bound).all()

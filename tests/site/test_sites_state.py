"""Sites: what a checkpoint holds, and resuming from it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import tagc
from support.distributed import on_ranks, run_ranks
from support.exact import equal
from support.marks import slow
from support.site_net import FOUR_BITS, adam, inside, policy, train
from support.small_net import local, local_weights, net
from support.states import shared_folder

DELAYED = policy(FOUR_BITS, every=4, fragments=2, delay=1, alpha=0.5)


class Run:
    """A model in sites, and its optimizer."""

    def __init__(self, kind: str, rank: int, world_size: int, rules: dict[str, Any]) -> None:
        self.model, sites, self.site = inside(kind, rank, world_size)
        self.optimizer = adam(self.model)
        self.handle = tagc.sites(self.model, self.optimizer, rules, sites=sites)

    def train(self, steps: range) -> None:
        train(self.model, self.optimizer, self.site, steps)

    def own(self) -> dict[str, Any]:
        """What a site saves of itself."""
        return {
            "weights": local_weights(self.model),
            "optimizer": deepcopy(self.optimizer.state_dict()),
        }

    def continue_from(self, own: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                local(param).copy_(own["weights"][name])
        self.optimizer.load_state_dict(own["optimizer"])


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "kind", "saver"),
    [(2, "one device", "safetensors"), (4, "FSDP2", "dcp"), slow(4, "DDP", "dcp")],
)
def test_resumes_to_the_bit(rank: int, world_size: int, kind: str, saver: str) -> None:
    """From between two exchanges, with one in flight, and its average not yet applied."""
    whole = Run(kind, rank, world_size, DELAYED)
    whole.train(range(6))
    own = whole.own()
    state = whole.handle.state_dict()
    assert any(".in_flight." in name and bool(t.any()) for name, t in state.items())
    with shared_folder() as folder:
        if saver == "dcp":
            dcp.save({"sites": whole.handle}, checkpoint_id=folder)
        else:
            whole.handle.save(folder)
        whole.train(range(6, 9))
        resumed = Run(kind, rank, world_size, DELAYED)
        resumed.train(range(3))
        if saver == "dcp":
            dcp.load({"sites": resumed.handle}, checkpoint_id=folder)
        else:
            resumed.handle.load(folder)
    resumed.continue_from(own)
    equal(resumed.handle.state_dict(), state)
    resumed.train(range(6, 9))
    equal(resumed.own(), whole.own())
    equal(resumed.handle.state_dict(), whole.handle.state_dict())


def saved(rank: int, kind: str, folder: Path) -> dict[str, Any]:
    run = Run(kind, rank, dist.get_world_size(), policy(FOUR_BITS, every=2))
    run.train(range(5))
    run.handle.save(folder)
    return accounts(run)


def loaded(rank: int, kind: str, folder: Path) -> dict[str, Any]:
    run = Run(kind, rank, dist.get_world_size(), policy(FOUR_BITS, every=2))
    run.handle.load(folder)
    found = accounts(run)
    assert run.handle.metrics().steps == 5
    run.train(range(5, 8))
    for anchor in run.handle.exchange_state.anchors:
        mine = [torch.empty_like(anchor.values) for _ in range(run.handle.sites)]
        dist.all_gather(mine, anchor.values, group=run.handle.exchange_state.group)
        assert all(torch.equal(anchor.values, other) for other in mine)
    return found


def accounts(run: Run) -> dict[str, Any]:
    """What this rank owes to the sum of changes, and as an owner to the average, and its anchors,
    by parameter of the whole site."""
    anchors = run.handle.exchange_state.anchors
    return {
        "sum": sum(float(r.double().sum()) for a in anchors for r in a.reducer.residuals.values()),
        "average": sum(
            float(r.double().sum()) for a in anchors for r in a.reducer.owner_residuals.values()
        ),
        # Every site has all anchors.
        "anchor": sum(float(a.values.double().sum()) for a in anchors) / run.handle.sites,
    }


def test_another_number_of_sites(tmp_path: Path) -> None:
    """What was owed to the sum of three is owed on by two, which are sharded."""
    old = run_ranks(saved, 3, "one device", tmp_path)
    new = run_ranks(loaded, 4, "FSDP2", tmp_path)
    was, now = ({k: sum(found[k] for found in every) for k in every[0]} for every in (old, new))
    assert was["sum"]
    torch.testing.assert_close(now["anchor"], was["anchor"], rtol=1e-9, atol=1e-9)
    # Two sites have no owners, so what these owed to the average is owed to the sum of two.
    assert was["average"]
    assert not now["average"]
    owed = was["sum"] + 2 * was["average"]
    torch.testing.assert_close(now["sum"], owed, rtol=1e-9, atol=1e-9)


@on_ranks(2)
@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_a_step_that_torch_takes_does_not_count(rank: int, world_size: int, rate: Any) -> None:
    """torch makes a new optimizer's state by a step at a learning rate of 0."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    handle = tagc.sites(model, optimizer, policy(every=2))
    get_state_dict(model, optimizer)
    assert handle.metrics().steps == 0
    train(model, optimizer, rank, range(2))
    assert handle.metrics().exchanges == 1

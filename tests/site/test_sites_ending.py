"""Sites: how they end, with an exchange in flight or after one that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tagc
from support.distributed import fails, on_ranks
from support.exact import equal
from support.site_net import FOUR_BITS, in_sites, policy, train
from support.small_net import local_weights
from tagc.collect import timeout_of

DELAYED = policy(FOUR_BITS, every=2, delay=1)


def in_flight(rank: int) -> tuple[Any, Any, Any]:
    """A model in sites, its optimizer and its handle, with an exchange in flight."""
    model, optimizer, handle = in_sites(DELAYED)
    train(model, optimizer, rank, range(2))
    return model, optimizer, handle


@pytest.mark.slow
def test_a_script_that_ends_meanwhile(tmp_path: Path) -> None:
    """Or raises: it has its own exit status, and does not abort in gloo's thread."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TAGC_OPS": "reference", "GLOO_SOCKET_IFNAME": "lo"}
    scripts = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "store")],
            env=env | {"RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [script.communicate(timeout=120)[1] for script in scripts]
    assert [script.returncode for script in scripts] == [0, 1], errors
    assert errors[1].endswith("RuntimeError: the script's own\n"), errors


def _script(store: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    in_flight(rank)
    if rank:
        raise RuntimeError("the script's own")
    dist.destroy_process_group()


@on_ranks(2)
def test_the_timeout_is_the_users(rank: int, world_size: int) -> None:
    """An exchange in flight waits no longer for another site than any other collective."""
    group = in_flight(rank)[2].exchange_state.group
    assert group is not dist.group.WORLD
    world: Any = dist.group.WORLD
    given = timeout_of(world, torch.device("cpu"))
    assert timeout_of(group, torch.device("cpu")) == given == timedelta(seconds=20)


@on_ranks(2)
def test_removal_after_a_failure_in_flight(rank: int, world_size: int) -> None:
    """It is raised once, and the model is free."""
    model, optimizer, handle = in_flight(rank)
    handle.exchange_state._flight.join()
    handle.exchange_state._flight.error = RuntimeError("the link is down")
    assert fails(handle.remove) == ("RuntimeError", "the link is down")
    handle.remove()
    tagc.sites(model, optimizer, DELAYED).remove()


@on_ranks(2)
def test_a_removed_handle(rank: int, world_size: int) -> None:
    """It changes and saves nothing any more, and a second removal does nothing."""
    model, optimizer, handle = in_flight(rank)
    state = handle.state_dict()
    handle.remove()
    handle.remove()
    before = local_weights(model)
    calls = (
        handle.exchange,
        handle.state_dict,
        lambda: handle.load_state_dict(state),
        lambda: handle.save("nowhere"),
        lambda: handle.load("nowhere"),
    )
    for call in calls:
        kind, text = fails(call)
        assert (kind, text[:24]) == ("ValueError", "these sites were removed")
    equal(local_weights(model), before)
    assert not Path("nowhere").exists()
    dist.barrier()
    again = tagc.sites(model, optimizer, DELAYED)
    dist.destroy_process_group()
    again.remove()
    # For the barrier after the test.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    _script(*sys.argv[1:])

"""The ranks that tests run on are used again and again, and must start each time as if new."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from support.block_net import net, sharded
from support.distributed import run_ranks


def clipped(rank: int, groups: int) -> None:
    """Reduce a norm over all ranks, in the last of some groups of them."""
    mesh = None
    for _ in range(groups):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        mesh = DeviceMesh.from_group(group, "cpu")
    model = sharded(net(), mesh=mesh)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_no_mesh_of_a_former_test_is_found_in_caches() -> None:
    """DTensor's caches held one of another group, which does not exist any more."""
    for groups in (1, 0):
        run_ranks(clipped, 2, groups)

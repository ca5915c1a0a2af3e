"""Ranks on NCCL: for every shipped policy and every way to join ranks, steps of training with the
Triton kernels, compared bit by bit with the reference; so are sites, whose exchanges run beside
training, and the collectives of a mesh that compresses.

    PYTHONPATH=tests python -m nccl_ranks

Ranks share GPUs if there are fewer GPUs than ranks. NCCL refuses that on one host, so each rank
says that it is a host of its own, and messages go through sockets: right or wrong, but slow.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tagc
from support.coded_mesh import coded
from support.site_net import adam
from support.small_net import local_weights
from support.uneven_block import SHIPPED, blocks, data, end_warm_up, sharded
from tagc.handle import collectives

Tensors = dict[str, Tensor]

RANKS = 4
STUCK = 60.0  # seconds of one case
# The codecs that differ most come first, as time may end.
POLICIES = sorted(SHIPPED, key=lambda name: name not in ("hybrid", "one-bit", "thrifty"))


GRAPHED = ("hybrid", "thrifty", "one-bit", "stateless", "attn-only", "hosts")


@cache
def ranks(device: torch.device, *shape: int) -> Any:
    return init_device_mesh(
        device.type, shape or (RANKS,), mesh_dim_names=("a", "b")[: len(shape) or 1]
    )


def flat(
    policy: str,
    ops: str,
    device: torch.device,
    *,
    hosts: int | None = 1,
    shape: Any = (),
    **how: Any,
) -> Any:
    """FSDP2 by blocks; ``shape`` is the mesh's, ``how`` goes to ``fully_shard``."""
    model = sharded(policy, blocks().to(device), mesh=ranks(device, *shape), **how)
    return tagc.wrap(model, policy, hosts=hosts, ops=ops)


def ahead(policy: str, ops: str, device: torch.device) -> Any:
    """Parameters are asked for before forward, on another stream."""
    model = flat(policy, ops, device)

    def ask(module: Any, args: Any) -> None:
        for work in [block.unshard(async_op=True) for block in module.layers]:
            work.wait()

    model.register_forward_pre_hook(ask)
    return model


def ddp(policy: str, ops: str, device: torch.device, hosts: int = 1) -> Any:
    model = DistributedDataParallel(blocks().to(device), bucket_cap_mb=1)
    return tagc.wrap(model, policy, hosts=hosts, ops=ops)


WAYS: dict[str, Callable[..., Any]] = {
    "flat": flat,
    "hosts": partial(flat, hosts=2),
    "replicas": partial(flat, hosts=None, shape=(2, RANKS // 2)),
    "ahead": ahead,
    "ddp_hosts": partial(ddp, hosts=2),
    # Gathered parameters stay between forward and backward.
    "kept": partial(flat, reshard_after_forward=False),
    "ddp": ddp,
}


def train(model: Any, optimizer: Any, device: torch.device, *, steps: int) -> None:
    rank = dist.get_rank()
    for step in range(steps):
        model(data(rank, step).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def left(model: Any, state: dict[str, Tensor]) -> Tensors:
    """A copy of the weights on this rank, and of what tagc would save."""
    return {name: t.cpu() for name, t in (local_weights(model) | state).items()}


def wrapped(way: Callable[..., Any], policy: str, ops: str, device: torch.device) -> Tensors:
    """After three steps of a model that :func:`tagc.wrap` got."""
    model = way(policy, ops, device)
    end_warm_up(tagc.compressor(model))
    train(model, adam(model), device, steps=3)
    return left(model, tagc.compressor(model).state_dict())


def captured(policy: str, ops: str, device: torch.device) -> Tensors:
    """After 52 steps with the fast operators. Instead of the reference's steps, those without a
    CUDA graph are the comparison."""
    graphed = device.type == "cuda" and ops != "reference"
    model = flat(policy, "triton" if device.type == "cuda" else "cpu", device)
    handle, optimizer = tagc.compressor(model), adam(model)
    end_warm_up(handle)
    x, graph = torch.empty(5, 131, device=device), None
    for step in range(52):
        x.copy_(data(dist.get_rank(), step))
        if graph is not None:
            handle.before_replay()
            graph.replay()
        elif graphed and step == 2:
            graph = torch.cuda.CUDAGraph()
            handle.before_capture()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                model(x).square().mean().backward()
            graph.replay()
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return left(model, handle.state_dict())


def sites(policy: str, ops: str, device: torch.device) -> Tensors:
    """After eight steps of two sites; in every other step an exchange is in flight."""
    mesh = ranks(device, 2, RANKS // 2)
    model = sharded({}, blocks().to(device), mesh=mesh["b"])
    optimizer = adam(model)
    often = {"schema": 1, "extends": policy, "sites": {"every": 2, "delay": 1}}
    handle = tagc.sites(model, optimizer, often, sites=mesh["a"], ops=ops)
    train(model, optimizer, device, steps=8)
    return left(model, handle.state_dict())


def groups(
    names: tuple[str, str], bits: int, policy: str, ops: str, device: torch.device
) -> Tensors:
    """What collectives of activations return, one after the other and several at once.

    Args:
        names: of the mesh's dimensions; others for each policy, as torch takes meshes with the same
            names for equal.
        bits: what arrives, see :func:`coded`.
    """
    with patch.dict(os.environ, {"TAGC_OPS": ops}):
        mesh: Any = tagc.init_device_mesh(
            device.type, (2, RANKS // 2), mesh_dim_names=names, policy=policy
        )
        whole: Any = tagc.init_device_mesh(
            device.type, (RANKS,), mesh_dim_names=names[1:], policy=policy
        )
        found: Tensors = {}
        for dtype in (torch.float32, torch.bfloat16):
            for label, group in (("half", mesh[names[1]].get_group()), ("all", whole.get_group())):
                results = passed(group, dtype, device)
                found |= {f"{label} {dtype} {i}": t.cpu() for i, t in enumerate(results)}
            for i, t in enumerate(sent_on(mesh[names[0]].get_group(), dtype, device, bits)):
                found[f"stages {dtype} {i}"] = t.cpu()
    return found


def passed(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    size, n = group.size(), 9001
    seed = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(size, n, generator=seed).to(device, dtype)
    out, exchanged = torch.empty_like(rows), torch.empty_like(rows)
    shard, reduced, mean = torch.empty_like(rows[0]), rows.clone(), rows[0].clone()
    with tagc.activations():
        works = [
            dist.all_gather_into_tensor(out.view(-1), rows[0], group=group, async_op=True),
            dist.reduce_scatter_tensor(shard, rows.view(-1), group=group, async_op=True),
            dist.all_reduce(reduced, group=group, async_op=True),
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=group, async_op=True),
            dist.all_to_all_single(exchanged, rows, group=group, async_op=True),
        ]
        for work in reversed(works):
            assert work is not None
            work.wait()
    return [out, shard, reduced, mean, exchanged]


def sent_on(
    group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, bits: int
) -> list[Tensor]:
    """What two stages of a pipeline send each other at once, once alone and once with more."""
    me = dist.get_rank()
    peer = dist.get_global_rank(group, 1 - group.rank())
    mine, theirs = ([_numbers(rank, n).to(device, dtype) for n in (9001, 7)] for rank in (me, peer))
    received = [torch.empty_like(t) for t in mine]
    for count in (1, 2):
        sends = [dist.P2POp(dist.isend, t, peer, group=group) for t in mine[:count]]
        receives = [dist.P2POp(dist.irecv, t, peer, group=group) for t in received[:count]]
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
        assert torch.equal(received[0].cpu(), coded(theirs[0].cpu(), bits).to(dtype))
    assert torch.equal(received[1], theirs[1])
    return received


def _numbers(rank: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


CASES: list[tuple[str, str, Callable[[str, str, torch.device], Tensors]]] = [
    ("hybrid", "flat", partial(wrapped, flat)),
    *((policy, "captured", captured) for policy in GRAPHED),
    ("hybrid-3d", "groups", partial(groups, ("pp", "tp"), 8)),
    ("mz-hybrid", "groups", partial(groups, ("cp", "ep"), 0)),
    ("sites", "sites", sites),
    ("sites-thin", "sites", sites),
]
CASES += [
    (policy, name, partial(wrapped, way))
    for policy in POLICIES
    for name, way in WAYS.items()
    if (policy, way) != ("hybrid", flat)
]


def compared(
    run: Callable[[str, str, torch.device], Tensors], policy: str, device: torch.device
) -> str:
    """What differs on this rank; "equal" if nothing does."""
    fast = "triton" if device.type == "cuda" else "cpu"
    try:
        with (
            warnings.catch_warnings(),
            # The results are compared anyway; ranks that share a GPU check for long.
            patch.object(collectives, "check", return_value="by nccl_ranks"),
        ):
            warnings.simplefilter("ignore")  # units as small as these may send more when compressed
            got, want = (run(policy, ops, device) for ops in (fast, "reference"))
    except tagc.PolicyError as refused:
        return f"refused: {refused}".splitlines()[0][:90]
    differing = [n for n in want if ".about" not in n and not torch.equal(got[n], want[n])]
    if not all(bool(x.isfinite().all()) for x in got.values() if x.is_floating_point()):
        return "not finite"
    return f"{len(differing)} of {len(want)} differ: {differing[:3]}" if differing else "equal"


def run_rank(rank: int, first: int, device_type: str, seconds: float, folder: str) -> None:
    """This rank's part of the cases from ``first`` on. ``folder`` counts those that began."""
    device = torch.device(device_type)
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
        if gpus < RANKS:
            os.environ |= {"NCCL_HOSTID": f"rank {rank}"}
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    logging.getLogger("tagc").setLevel(logging.ERROR)
    store = dist.FileStore(str(Path(folder) / f"store{first}"), RANKS)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=40)
    )
    start = time.monotonic()
    for index, (policy, way, run) in list(enumerate(CASES))[first:]:
        if rank == 0:
            (Path(folder) / "began").write_text(str(index + 1))
            store.set(f"go{index}", str(int(time.monotonic() - start < seconds)))
        if store.get(f"go{index}") == b"0":
            say(rank, f"no time for {len(CASES) - index} of {len(CASES)} cases")
            break
        # A rank that waits for others in vain says where, and ends.
        faulthandler.dump_traceback_later(STUCK, exit=True)
        since = time.monotonic()
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, compared(run, policy, device))
        answers = " | ".join(dict.fromkeys(found))
        took = time.monotonic() - since
        say(rank, f"{policy:12} {way:10} {took:5.1f} s  {answers}")
        if any(answer != "equal" and not answer.startswith("refused") for answer in found):
            (Path(folder) / "wrong").touch()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses")
    parser.add_argument("--seconds", type=float, default=600, help="begin no case after these")
    args = parser.parse_args()
    failed = first = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "began").write_text("0")
        while failed < 5:
            given = (first, args.device, args.seconds, folder)
            try:
                mp.spawn(run_rank, args=given, nprocs=RANKS)
                break
            except Exception:  # the cases after it are tried all the same
                failed += 1
                first = int((Path(folder) / "began").read_text())
                policy, way, _ = CASES[first - 1]
                print(f"{policy}, {way}: {traceback.format_exc()}", flush=True)
        return int(failed > 0 or (Path(folder) / "wrong").exists())


if __name__ == "__main__":
    sys.exit(main())

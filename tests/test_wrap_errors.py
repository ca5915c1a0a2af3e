"""What `tagc.wrap` and a wrapped model's steps refuse, on every rank, and the life of a wrapped
model."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as with_hooks
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import tagc
from support import fsdp1_net, small_net
from support.block_net import wrap
from support.distributed import on_ranks
from support.failing import fails
from support.launching import sketch_of
from support.marks import covering, slow
from support.units import normal, reduce, unit_plan, unit_reducer
from tagc.collect import check_backends

MLP_ONLY = {
    "schema": 1,
    "gradients": [
        {"when": {"role": "mlp", "min_numel": 1}, "codec": {"kind": "sketch", "density": 0.2}}
    ],
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 3 * width)
        self.down_proj = nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down_proj(torch.relu(self.up_proj(x))))


def net() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential()
    model.layers = nn.Sequential(Block(9), Block(9))
    model.forward = model.layers.forward
    return model


def sharded() -> Any:
    model = net()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def changed(**when_or_codec: Any) -> dict:
    """`MLP_ONLY` with keys of its only rule replaced."""
    return {"schema": 1, "gradients": [MLP_ONLY["gradients"][0] | when_or_codec]}


def backward(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 36).view(4, 9)
    (model(x) * scale * x).sum().backward()


# On each rank for itself

REFUSED: list[tuple[Callable[[], nn.Module], Any, str, tuple[str, ...]]] = [
    (net, MLP_ONLY, "ValueError", ("is not sharded: call torch.distributed.fsdp.fully_shard",)),
    (
        lambda: nn.Sequential(with_hooks(nn.Linear(9, 9))),
        MLP_ONLY,
        "ValueError",
        (
            "'0' is data parallel by replicate(), whose hooks tagc cannot reach",
            "use torch.nn.parallel.DistributedDataParallel",
        ),
    ),
    (sharded, "atn-only", "PolicyError", ("did you mean 'attn-only'?",)),
    (
        sharded,
        changed(codec={"kind": "sketch", "densty": 0.1}),
        "PolicyError",
        ("did you mean 'density'?",),
    ),
    (
        sharded,
        changed(when={"name": "*.up_prj.*"}),
        "PolicyError",
        ("compresses nothing in this model", "layers.0.up_proj.weight"),
    ),
]


@on_ranks(2)
def test_what_wrap_refuses(rank: int, world_size: int) -> None:
    for make, policy, expected, parts in REFUSED:
        model = make()
        kind, text = fails(lambda model=model, policy=policy: tagc.wrap(model, policy))
        assert kind == expected, text
        for part in parts:
            assert part in text
        # Nothing is left behind: the model is as it was.
        kind, text = fails(lambda model=model: tagc.compressor(model))
        assert (kind, "not wrapped: call tagc.wrap(" in text) == ("ValueError", True), text
        backward(model)
    kind, text = fails(lambda: tagc.wrap(sharded(), MLP_ONLY, ops="gpu"))
    assert kind == "ValueError"
    assert "unknown implementation 'gpu'; choose from" in text
    model = sharded()
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        tagc.wrap(model, "dense")
    tagc.wrap(model, "dense")


def test_stand_ins_for_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        for policy in (MLP_ONLY, "dense", "hybrid"):
            with pytest.raises(ValueError, match=r"backend 'fake'.*gloo or nccl.*tagc\.explain"):
                tagc.wrap(sharded(), policy)
        # Of class ProcessGroup alone, as those are by which torch's own tests run ranks as threads.
        threads: Any = dist.ProcessGroup(0, 4)  # pyright: ignore[reportCallIssue]
        monkeypatch.setattr(dist, "get_backend", lambda group: "threaded")
        with pytest.raises(ValueError, match=r"'threaded' has no backend for any device.*process"):
            check_backends([threads])
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_meshes_with_a_dimension_of_one_rank(rank: int, world_size: int) -> None:
    """Replicas that are not sharded, and a single replica: gradients are averages all the same."""
    rules = changed(codec={"kind": "quantized", "bits": 8})["gradients"]
    only = {"schema": 1, "gradients": rules}
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

        def gradient(policy: Any, mesh: Any = mesh) -> Tensor:
            torch.manual_seed(0)
            model: Any = fully_shard(Block(9), mesh=mesh)
            if policy is not None:
                tagc.wrap(model, policy)
            backward(model, 1.0 + rank)
            return model.up_proj.weight.grad.to_local()

        native = gradient(None)
        if shape == (2, 1):
            message = "over a single rank.*Write rules under `replicas`"
            with pytest.warns(UserWarning, match=message):
                torch.testing.assert_close(gradient(only), native)
        compressed = gradient(only | {"replicas": rules})
        close = {"rtol": 0, "atol": 0.02 * float(native.abs().max())}
        torch.testing.assert_close(compressed, native, **close)
        assert shape == (1, 2) or not torch.equal(compressed, native)


@on_ranks(2)
def test_wrapping_twice(rank: int, world_size: int) -> None:
    model = tagc.wrap(sharded(), MLP_ONLY)
    for other in (model, model.layers[0], nn.Sequential(model)):
        kind, text = fails(lambda other=other: tagc.wrap(other, MLP_ONLY))
        assert kind == "ValueError"
        assert "already wrapped" in text
    assert ".remove()" in text
    backward(model)
    assert tagc.compressor(model).metrics().steps == 1


class Mine:
    """A collective that is neither FSDP's nor tagc's."""


@on_ranks(2)
def test_collectives_of_others_are_not_replaced(rank: int, world_size: int) -> None:
    model, mine = sharded(), Mine()
    model.layers[0].set_custom_all_gather(mine)
    int8 = {"when": {"name": "*.weight"}, "codec": {"kind": "quantized", "bits": 8}}
    kind, text = fails(lambda: wrap(model, MLP_ONLY | {"parameters": [int8]}))
    assert kind == "ValueError"
    assert "'layers.0' has its own all-gather, Mine" in text
    # Gradients alone leave it as it is.
    tagc.wrap(model, MLP_ONLY)
    tagc.compressor(model).remove()
    model.layers[1].set_custom_reduce_scatter(mine)
    kind, text = fails(lambda: tagc.wrap(model, MLP_ONLY))
    assert kind == "ValueError"
    assert "'layers.1' has its own reduce-scatter, Mine (from set_custom_reduce_scatter)" in text


# Ranks that differ, or of which one fails


def wrap_misspelt() -> None:
    """The policy that the environment names, which ranks need not have alike."""
    with patch.dict(os.environ, {"TAGC_POLICY": "one-bt"}):
        tagc.wrap(sharded())


def wrap_and_train(**options: Any) -> None:
    backward(tagc.wrap(sharded(), MLP_ONLY, **options))


OTHER_DENSITY = changed(codec={"kind": "sketch", "density": 0.3})
# What rank 1 does, its kind of error, and what the others' errors say. (Its own, if None.)
DIFFERING: list[tuple[Callable[[], Any], str | None, str]] = [
    (
        lambda: tagc.wrap(sharded(), OTHER_DENSITY),
        None,
        "tagc policy differs between ranks: rank 0",
    ),
    (
        lambda: tagc.wrap(fully_shard(net()), MLP_ONLY),
        None,
        "tagc plan differs between ranks: rank 0 has",
    ),
    (wrap_misspelt, "PolicyError", "TAGC_POLICY=one-bt: no built-in policy"),
    (
        lambda: tagc.wrap(sharded().requires_grad_(False), MLP_ONLY),
        "ValueError",
        "tagc.wrap failed on rank 1",
    ),
    (lambda: wrap_and_train(ops="cqu"), "ValueError", "tagc.wrap failed on rank 1"),
]


@on_ranks(3)
def test_ranks_that_differ(rank: int, world_size: int) -> None:
    for differs, expected, message in DIFFERING:
        kind, text = fails(differs if rank == 1 else wrap_and_train)
        if rank == 1 and expected is not None:
            assert kind in (expected, "PolicyError"), text
        else:
            assert kind == "RuntimeError", text
            assert message in text
            assert "rank 1" in text
        if expected == "PolicyError":
            assert "did you mean 'one-bit'?" in text


# In a step


def replicated() -> Any:
    model = small_net.net()
    for module in (model.first, model.second, model):
        replicate(module)
    return model


SHARDED: dict[str, Callable[[], Any]] = {
    "FSDP2": small_net.sharded,
    "FSDP1": lambda: fsdp1_net.sharded(use_orig_params=True),
    "DDP": lambda: DistributedDataParallel(small_net.net()),
    "replicate": replicated,
}
SECOND = {"when": {"name": "second.*"}, "codec": {"kind": "quantized"}}


@on_ranks(2)
@pytest.mark.parametrize("api", SHARDED)
def test_parameters_that_the_plan_does_not_know(rank: int, world_size: int, api: str) -> None:
    """No unit that compresses has anything to do with them. To wrap again is the remedy."""
    for change in ("unfrozen", "added"):
        inner: Any = small_net.net()
        inner.first[0].requires_grad_(False)
        with (
            patch.object(small_net, "net", return_value=inner),
            patch.object(fsdp1_net, "net", return_value=inner),
        ):
            model = SHARDED[api]()
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert len(frozen) == 2
        wrap(model, {"schema": 1, "gradients": [SECOND]})
        inner = model.module if api == "DDP" else model
        inner.note = nn.Linear(2, 2).requires_grad_(False)
        small_net.loss_of(model, rank, 0).backward()
        if change == "added":
            inner.extra = nn.Linear(11, 1)
        else:
            frozen[0].requires_grad_(True)
        kind, text = fails(lambda model=model: small_net.loss_of(model, rank, 1).backward())
        assert kind == "RuntimeError", text
        assert ("first.0.weight" if change == "unfrozen" else "extra.weight") in text
        assert "plan does not know them" in text
        if api == "FSDP2" and change == "unfrozen":
            tagc.compressor(model).remove()
            wrap(model, {"schema": 1, "gradients": [SECOND]})
            small_net.loss_of(model, rank, 2).backward()


@on_ranks(2, slow(3))
@pytest.mark.parametrize(
    ("bad", "first", "ops"),
    covering([float("nan"), float("inf"), float("-inf")], [0, 2], ["cpu", "reference"]),
)
def test_non_finite_gradients(rank: int, world_size: int, bad: float, first: int, ops: str) -> None:
    """One bad element on rank 0 for the last rank: it comes out there, at once, and only then.

    `first` is the step with the bad element; in step 0 thresholds are sampled from it."""
    plan = unit_plan(world_size)
    owner = world_size - 1
    for segment in plan.segments:
        reducer = unit_reducer(plan, ops)
        start = reducer.counters.steps + first
        for step in range(start + 3):
            buffers = normal(world_size, plan.columns, step)
            if step == start:
                buffers[0, owner, segment.start + 4] = bad
            out = reduce(reducer, buffers[rank])
            hit = step == start and rank == owner
            for other in plan.segments:
                finite = out[other.start : other.stop].isfinite()
                assert finite.all() != (hit and other is segment)
            assert all(r.isfinite().all() for r in reducer.residuals.values())
            assert sketch_of(reducer).threshold.isfinite().all()


# Life of a wrapped model


@on_ranks(2)
def test_wrapping_after_a_forward(rank: int, world_size: int) -> None:
    """Parameters that stay unsharded after a forward are other objects, under the same names. And
    models that are discarded go."""
    torch.manual_seed(0)
    model: Any = fully_shard(Block(9), reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 9))
    tagc.wrap(model, MLP_ONLY)
    backward(model)
    assert tagc.compressor(model).metrics().steps == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None

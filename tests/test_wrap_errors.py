"""What `tagc.wrap` refuses on each rank for itself, and the life of a wrapped model."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tagc
from support.distributed import on_ranks, run_ranks
from support.failing import fails
from support.mlp_net import MLP_ONLY, Block, Net, backward, changed, sharded
from tagc.collect import check_backends


def refusal(model: nn.Module, policy: Any = MLP_ONLY) -> tuple[str, str]:
    failed = fails(lambda: tagc.wrap(model, policy))
    # Nothing is left behind: the model is as it was.
    assert fails(lambda: tagc.compressor(model))[0] == "ValueError"
    backward(model)
    return failed


# At wrap time, on each rank for itself


def of_replicate() -> nn.Module:
    return nn.Sequential(replicate(nn.Linear(9, 9)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str, tuple[str, ...]]] = {
    "not sharded": (
        Net,
        MLP_ONLY,
        "ValueError",
        ("Net is not sharded: call torch.distributed.fsdp.fully_shard",),
    ),
    "replicate with hooks": (
        of_replicate,
        MLP_ONLY,
        "ValueError",
        (
            "'0' is data parallel by replicate(), whose hooks tagc cannot reach",
            "use torch.nn.parallel.DistributedDataParallel",
        ),
    ),
    "misspelt policy": (sharded, "atn-only", "PolicyError", ("did you mean 'attn-only'?",)),
    "misspelt key": (
        sharded,
        changed(codec={"kind": "sketch", "densty": 0.1}),
        "PolicyError",
        ("did you mean 'density'?",),
    ),
    "nothing to compress": (
        sharded,
        changed(when={"name": "*.up_prj.*"}),
        "PolicyError",
        ("compresses nothing in this model", "layers.0.up_proj.weight"),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_wrap_refuses(rank: int, world_size: int, case: str) -> None:
    model, policy, expected, words = REFUSED[case]
    kind, said = refusal(model(), policy)
    assert kind == expected, said
    for part in words:
        assert part in said


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
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_meshes_with_a_dimension_of_one_rank(
    rank: int, world_size: int, shape: tuple[int, int]
) -> None:
    """Replicas that are not sharded, and a single replica: gradients are averages all the same."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    rules = changed(codec={"kind": "quantized", "bits": 8})["gradients"]
    only = {"schema": 1, "gradients": rules}

    def gradient(policy: Any) -> Tensor:
        torch.manual_seed(0)
        model: Any = fully_shard(Block(9), mesh=mesh)
        if policy is not None:
            tagc.wrap(model, policy)
        backward(model, 1.0 + rank)
        return model.up_proj.weight.grad.to_local()

    native = gradient(None)
    if shape == (2, 1):
        with pytest.warns(UserWarning, match="over a single rank.*Write rules under `replicas`"):
            torch.testing.assert_close(gradient(only), native)
    compressed = gradient(only | {"replicas": rules})
    torch.testing.assert_close(compressed, native, rtol=0, atol=0.02 * float(native.abs().max()))
    assert shape == (1, 2) or not torch.equal(compressed, native)


@on_ranks(2)
def test_wrapping_twice(rank: int, world_size: int) -> None:
    model = tagc.wrap(sharded(), MLP_ONLY)
    for other in (model, model.layers[0], nn.Sequential(model)):
        kind, said = fails(lambda other=other: tagc.wrap(other, MLP_ONLY))
        assert kind == "ValueError"
        assert "already wrapped" in said
    assert ".remove()" in said
    backward(model)
    assert tagc.compressor(model).metrics().steps == 1


@on_ranks(2)
def test_misspelt_ops(rank: int, world_size: int) -> None:
    kind, said = fails(lambda: tagc.wrap(sharded(), MLP_ONLY, ops="gpu"))
    assert kind == "ValueError"
    assert "unknown implementation 'gpu'; choose from" in said


@on_ranks(2)
def test_compressor_of_an_unwrapped_model(rank: int, world_size: int) -> None:
    model = sharded()
    for other in (model, model.layers[0], nn.Linear(2, 2)):
        kind, said = fails(lambda other=other: tagc.compressor(other))
        assert kind == "ValueError"
        assert "not wrapped: call tagc.wrap(" in said


# What others replaced


class Mine:
    """A collective that is neither FSDP's nor tagc's."""


@on_ranks(2)
def test_collectives_of_others_are_not_replaced(rank: int, world_size: int) -> None:
    model, mine = sharded(), Mine()
    model.layers[0].set_custom_all_gather(mine)
    rules = {"name": "*.weight", "min_numel": 1}
    int8 = {"kind": "quantized", "bits": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, said = fails(
            lambda: tagc.wrap(model, MLP_ONLY | {"parameters": [{"when": rules, "codec": int8}]})
        )
    assert kind == "ValueError"
    assert "'layers.0' has its own all-gather, Mine" in said
    # Gradients alone leave it as it is.
    tagc.wrap(model, MLP_ONLY)
    tagc.compressor(model).remove()

    model.layers[1].set_custom_reduce_scatter(mine)
    kind, said = fails(lambda: tagc.wrap(model, MLP_ONLY))
    assert kind == "ValueError"
    assert "'layers.1' has its own reduce-scatter, Mine (from set_custom_reduce_scatter)" in said


# Life of a wrapped model


@on_ranks(2)
def test_wrapping_after_a_forward(rank: int, world_size: int) -> None:
    """Parameters that stay unsharded after a forward are other objects, under the same names."""
    torch.manual_seed(0)
    model: Any = fully_shard(Block(9), reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 9))
    tagc.wrap(model, MLP_ONLY)
    backward(model)
    assert tagc.compressor(model).metrics().steps == 1


@on_ranks(2)
def test_discarded_models_go(rank: int, world_size: int) -> None:
    model: Any = fully_shard(Block(9))
    tagc.wrap(model, MLP_ONLY)
    backward(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@on_ranks(2)
def test_inference_mode(rank: int, world_size: int) -> None:
    model = sharded()
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        tagc.wrap(model, "dense")
    tagc.wrap(model, "dense")


def told_on_every_rank(odd_one_out: Callable[[], Any], others: Callable[[], Any]) -> list:
    """What each of three ranks is told when rank 1 differs."""
    return run_ranks(_told, 3, odd_one_out, others, timeout=24)


def _told(rank: int, odd_one_out: Callable[[], Any], others: Callable[[], Any]) -> Any:
    return fails(odd_one_out if rank == 1 else others)


def wrap_right() -> None:
    tagc.wrap(sharded(), MLP_ONLY)


def wrap_other_density() -> None:
    tagc.wrap(sharded(), changed(codec={"kind": "sketch", "density": 0.3}))


def wrap_misspelt() -> None:
    """The policy that the environment names, which ranks need not have alike."""
    os.environ["TAGC_POLICY"] = "one-bt"
    try:
        tagc.wrap(sharded())
    finally:
        del os.environ["TAGC_POLICY"]


def wrap_fewer_units() -> None:
    model: Any = fully_shard(Net())
    tagc.wrap(model, MLP_ONLY)


def wrap_frozen() -> None:
    tagc.wrap(sharded().requires_grad_(False), MLP_ONLY)


def wrap_once_and_train() -> None:
    model = tagc.wrap(sharded(), MLP_ONLY)
    backward(model)


def wrap_and_train_misspelt_ops() -> None:
    model = tagc.wrap(sharded(), MLP_ONLY, ops="cqu")
    backward(model)


@pytest.mark.parametrize(
    ("odd_one_out", "what"),
    [
        (wrap_other_density, "policy"),
        (wrap_fewer_units, "plan"),
    ],
)
def test_ranks_that_differ(odd_one_out: Callable, what: str) -> None:
    for kind, said in told_on_every_rank(odd_one_out, wrap_right):
        assert kind == "RuntimeError", said
        assert f"tagc {what} differs between ranks: rank 0 has" in said
        assert "rank 1 has" in said


def test_policy_misspelt_on_one_rank() -> None:
    told = told_on_every_rank(wrap_misspelt, wrap_right)
    assert told[1][0] == "PolicyError"
    assert "did you mean 'one-bit'?" in told[1][1]
    for kind, said in (told[0], told[2]):
        assert kind == "RuntimeError"
        assert "tagc.wrap failed on rank 1: PolicyError" in said
        assert "TAGC_POLICY=one-bt: no built-in policy" in said
        assert "did you mean 'one-bit'?" in said


@pytest.mark.parametrize(
    ("odd_one_out", "others"),
    [
        (wrap_frozen, wrap_right),
        (wrap_and_train_misspelt_ops, wrap_once_and_train),
    ],
)
def test_failure_on_one_rank(odd_one_out: Callable, others: Callable) -> None:
    told = told_on_every_rank(odd_one_out, others)
    assert told[1][0] in ("ValueError", "PolicyError")
    for kind, said in (told[0], told[2]):
        assert kind == "RuntimeError"
        assert "rank 1" in said, said

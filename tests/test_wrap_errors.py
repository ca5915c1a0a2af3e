"""What `tagc.wrap` and the wrapped model refuse, on every rank alike, and non-finite gradients."""

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
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tagc
from support.distributed import on_ranks, run_ranks
from support.failing import fails
from support.marks import covering, slow
from support.units import normal, reduce, unit_plan, unit_reducer
from tagc.collect import check_backends

MLP_ONLY = {
    "schema": 1,
    "gradients": [
        {
            "when": {"role": "mlp", "min_numel": 1},
            "codec": {"kind": "sketch", "density": 0.2},
        }
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


class Net(nn.Module):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(width: int = 9) -> Any:
    torch.manual_seed(0)
    model = Net(width)
    for layer in model.layers:
        fully_shard(layer)
    del model.unused
    return fully_shard(model)


def changed(**when_or_codec: Any) -> dict:
    """`MLP_ONLY` with keys of its only rule replaced."""
    return {"schema": 1, "gradients": [MLP_ONLY["gradients"][0] | when_or_codec]}


def backward(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 36).view(4, 9)
    (model(x) * scale * x).sum().backward()


def refusal(model: nn.Module, policy: Any = MLP_ONLY) -> tuple[str, str]:
    failed = fails(lambda: tagc.wrap(model, policy))
    # Nothing is left behind: the model is as it was.
    assert fails(lambda: tagc.compressor(model))[0] == "ValueError"
    backward(model)
    return failed


# At wrap time, on each rank for itself


@on_ranks(2)
def test_not_sharded(rank: int, world_size: int) -> None:
    kind, said = refusal(Net())
    assert kind == "ValueError"
    assert "Net is not sharded: call torch.distributed.fsdp.fully_shard" in said

    kind, said = refusal(nn.Sequential(replicate(nn.Linear(9, 9))))
    assert kind == "ValueError"
    assert "'0' is data parallel by replicate(), whose hooks tagc cannot reach" in said
    assert "use torch.nn.parallel.DistributedDataParallel" in said


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
    kind, said = fails(lambda: tagc.wrap(model, MLP_ONLY))
    assert kind == "ValueError"
    assert "already wrapped" in said
    assert ".remove()" in said
    backward(model)
    assert tagc.compressor(model).metrics().steps == 1


@on_ranks(2)
def test_misspelt(rank: int, world_size: int) -> None:
    model = sharded()
    for policy, hint in (
        ("atn-only", "did you mean 'attn-only'?"),
        ("no/such/file.yaml", "cannot be read"),
        (changed(when={"role": "atention"}), "did you mean 'attention'?"),
        (changed(when={"rol": "mlp"}), "did you mean 'role'?"),
        (changed(codec={"kind": "sketsch", "density": 0.1}), "did you mean 'sketch'?"),
        (changed(codec={"kind": "sketch", "densty": 0.1}), "did you mean 'density'?"),
    ):
        kind, said = refusal(model, policy)
        assert kind == "PolicyError", said
        assert hint in said
    kind, said = fails(lambda: tagc.wrap(model, MLP_ONLY, ops="gpu"))
    assert kind == "ValueError"
    assert "unknown implementation 'gpu'; choose from" in said


@on_ranks(2)
def test_compressing_nothing(rank: int, world_size: int) -> None:
    # The default policy is for attention, the model has none; the built-in ones spare small ones.
    for policy in ("attn-only", changed(when={"name": "*.up_prj.*"})):
        kind, said = refusal(sharded(), policy)
        assert kind == "PolicyError", said
        assert "compresses nothing in this model" in said
        assert "layers.0.up_proj.weight" in said
    assert fails(lambda: tagc.wrap(sharded()))[0] == "PolicyError"
    tagc.wrap(sharded(), "dense")


@on_ranks(2)
def test_a_rule_without_match_warns(rank: int, world_size: int) -> None:
    rules = [changed(when={"name": "*.up_prj.*"})["gradients"][0], MLP_ONLY["gradients"][0]]
    with pytest.warns(UserWarning, match=r"rule gradients\[0\] matches no parameter"):
        tagc.wrap(sharded(), {"schema": 1, "gradients": rules})


@on_ranks(2)
def test_compressor_of_an_unwrapped_model(rank: int, world_size: int) -> None:
    model = sharded()
    for other in (model, model.layers[0], nn.Linear(2, 2)):
        kind, said = fails(lambda other=other: tagc.compressor(other))
        assert kind == "ValueError"
        assert "not wrapped: call tagc.wrap(" in said


# At wrap time, because ranks differ


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


def wrap_other_width() -> None:
    tagc.wrap(sharded(width=11), MLP_ONLY)


def wrap_fewer_units() -> None:
    model: Any = fully_shard(Net())
    tagc.wrap(model, MLP_ONLY)


def wrap_frozen() -> None:
    tagc.wrap(sharded().requires_grad_(False), MLP_ONLY)


def wrap_twice() -> None:
    tagc.wrap(tagc.wrap(sharded(), MLP_ONLY), MLP_ONLY)


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
        (wrap_other_width, "plan"),
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


# In a step


@on_ranks(2, 3)
def test_parameters_unfrozen_later(rank: int, world_size: int) -> None:
    model = sharded()
    model.layers[1].down_proj.weight.requires_grad_(False)
    tagc.wrap(model, MLP_ONLY)
    model.layers[1].down_proj.weight.requires_grad_(True)
    kind, said = fails(lambda: backward(model))
    assert kind == "RuntimeError", said
    assert "unit 'layers.1'" in said
    assert "layers.1.down_proj.weight among them" in said
    assert "Unfreeze and shard parameters before tagc.wrap" in said


@on_ranks(2, 3)
def test_the_remedy_for_unused_parameters(rank: int, world_size: int) -> None:
    model: Any = fully_shard(Net())
    model.set_reduce_scatter_unused_params(True)
    tagc.wrap(model, MLP_ONLY)
    backward(model)
    grad = model.unused.weight.grad.to_local()
    torch.testing.assert_close(grad, torch.zeros_like(grad))
    assert model.layers[0].up_proj.weight.grad.to_local().any()


@on_ranks(2)
def test_units_left_dense_may_have_unused_parameters(rank: int, world_size: int) -> None:
    """FSDP itself reduces what gradients there are, and so must a unit with nothing compressed."""
    model: Any = Net()
    for layer in model.layers:
        fully_shard(layer)
    model.extra = nn.LayerNorm(9)
    model.register_forward_hook(lambda module, args, out: module.extra(out))
    backward(tagc.wrap(fully_shard(model), MLP_ONLY))
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    assert grads["extra.weight"].to_local().any()
    assert grads["unused.weight"] is None


@on_ranks(2)
def test_unsupported_reduction(rank: int, world_size: int) -> None:
    model = sharded()
    tagc.wrap(model, MLP_ONLY)
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(3.0)
    kind, said = fails(lambda: backward(model))
    assert kind == "RuntimeError"
    assert "unit 'layers.1'" in said
    assert "is reduced with PREMUL_SUM, but only SUM and AVG can be compressed" in said
    assert "set_force_sum_reduction_for_comms(True)" in said

    remedied = tagc.wrap(sharded(), MLP_ONLY)
    for module in remedied.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
    backward(remedied)


@on_ranks(2, slow(3))
@pytest.mark.parametrize(
    ("bad", "first", "ops"),
    covering([float("nan"), float("inf"), float("-inf")], [0, 2], ["cpu", "reference"]),
)
def test_non_finite_gradients(rank: int, world_size: int, bad: float, first: int, ops: str) -> None:
    """One bad element on rank 0 for the last rank: it comes out there, at once, and only then.

    `first` is the step with the bad element; in step 0 thresholds are sampled from it."""
    plan = unit_plan(world_size)
    reducer = unit_reducer(plan, ops)
    owner = world_size - 1
    for segment in plan.segments:
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
            assert reducer.coder.codecs["sketch"].controllers[0].threshold.isfinite().all()
        reducer = unit_reducer(plan, ops)


@on_ranks(2)
def test_overflowing_loss_reaches_every_owner(rank: int, world_size: int) -> None:
    model = tagc.wrap(sharded(), MLP_ONLY)
    for step in range(4):
        model.zero_grad()
        backward(model, float("inf") if step == 1 and rank == 0 else 1.0)
        grads = [p.grad.to_local() for p in model.layers.parameters()]
        assert all(grad.isfinite().all() for grad in grads) == (step != 1)
        if step == 1:
            assert not any(g.isfinite().all() for g in grads if g.numel())
    assert tagc.compressor(model).metrics().residual_norm < float("inf")


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
def test_wrapping_a_part_of_a_wrapped_model(rank: int, world_size: int) -> None:
    model = tagc.wrap(sharded(), MLP_ONLY)
    for other in (model.layers[0], nn.Sequential(model)):
        kind, said = fails(lambda other=other: tagc.wrap(other, MLP_ONLY))
        assert kind == "ValueError"
        assert "already wrapped" in said


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

"""The life of a wrapped model, however it is shared: removed, tagc leaves native training, and it
may be wrapped again; dropped, it is freed; and parameters that a plan does not know are an error.
"""

from __future__ import annotations

import gc
import io
import weakref
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import tagc
from support import fsdp1_net, small_net
from support.block_net import wrap
from support.distributed import fails, on_ranks
from support.exact import EXACT, equal
from support.layouts import Layout
from support.site_net import FOUR_BITS, adam, policy
from support.site_net import train as train_site
from support.small_net import local_weights, loss_of, net, sharded, train
from support.states import POLICIES, run, set_weights, wrapped

APIS = ("FSDP2", "FSDP1", "DDP", "replicate")
QUANTIZED = POLICIES["quantized residual"]


@on_ranks(2)
@pytest.mark.parametrize(
    ("api", "policy"),
    [*((api, "quantized residual") for api in APIS), ("FSDP2", "changes")],
)
def test_removed_wrapped_again_and_dropped(
    rank: int, world_size: int, api: Any, policy: str
) -> None:
    layout = Layout(2, api)
    model, native = layout.wrapped(POLICIES[policy]), layout.sharded()
    run(model, rank, range(1))
    compressor = tagc.compressor(model)
    assert 0 < compressor.metrics().wire_bytes < compressor.metrics().dense_bytes
    compressor.remove()
    compressor.remove()  # nothing more
    set_weights(model, local_weights(native))
    for each in (model, native):
        run(each, rank, range(2, 3))
    equal(local_weights(model), local_weights(native))
    # Parameters that stay unsharded after a forward are other objects, under the same names.
    with torch.no_grad():
        loss_of(model, rank, 4)
    wrapped(POLICIES[policy], model)
    compressor.remove()  # leaves the new one alone
    kind, text = fails(compressor.state_dict)
    assert (kind, "was removed from its model" in text) == ("ValueError", True), text
    run(model, rank, range(5, 6))
    assert tagc.compressor(model).metrics().steps == 1
    # DDP holds its hook where the garbage collector does not look.
    seen = [weakref.ref(model), weakref.ref(tagc.compressor(model).reducers[0])]
    del model, compressor
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


@on_ranks(2)
def test_meshes_with_a_dimension_of_one_rank(rank: int, world_size: int) -> None:
    """Replicas that are not sharded, and a single replica: gradients are averages all the same."""
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

        def gradient(policy: Any, mesh: Any = mesh) -> Tensor:
            model = sharded(mesh=mesh)
            if policy is not None:
                wrap(model, policy)
            loss_of(model, rank, 0).backward()
            return model.second[0].weight.grad.to_local()

        native = gradient(None)
        if shape == (2, 1):
            with pytest.warns(UserWarning, match="single rank.*Write rules under `replicas`"):
                tagc.wrap(sharded(mesh=mesh), QUANTIZED)
        compressed = gradient(QUANTIZED | {"replicas": QUANTIZED["gradients"]})
        # Of each rounding half a code of 4 bits, and what that leaves in a block.
        close = {"rtol": 0, "atol": 0.2 * float(native.abs().max())}
        torch.testing.assert_close(compressed, native, **close)
        assert shape == (1, 2) or not torch.equal(compressed, native)


SECOND = {
    "schema": 1,
    "gradients": [{"when": {"name": "second.*"}, "codec": {"kind": "quantized"}}],
}


@on_ranks(2)
@pytest.mark.parametrize("api", APIS)
def test_parameters_that_the_plan_does_not_know(rank: int, world_size: int, api: Any) -> None:
    """No unit that compresses has anything to do with them. To wrap again is the remedy."""
    names = {"unfrozen": "first.0.weight", "added": "extra.weight", "noted": "note.weight"}
    for change in names:
        inner: Any = small_net.net()
        inner.first[0].requires_grad_(False)
        with (
            patch.object(small_net, "net", return_value=inner),
            patch.object(fsdp1_net, "net", return_value=inner),
        ):
            model = Layout(2, api).sharded()
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert len(frozen) == 2
        wrap(model, SECOND)
        inner = model.module if api == "DDP" else model
        inner.note = nn.Linear(2, 2).requires_grad_(False)
        state = deepcopy(tagc.compressor(model).state_dict())
        loss_of(model, rank, 0).backward()
        tagc.compressor(model).load_state_dict(state)  # of the same step as the next one
        if change == "added":
            inner.extra = nn.Linear(11, 1)
        elif change == "noted":
            inner.note.requires_grad_(True)
        else:
            frozen[0].requires_grad_(True)
        kind, text = fails(lambda model=model: loss_of(model, rank, 1).backward())
        assert kind == "RuntimeError", text
        assert names[change] in text
        assert "plan does not know them" in text
        if api == "FSDP2" and change == "unfrozen":
            tagc.compressor(model).remove()
            wrap(model, SECOND)
            loss_of(model, rank, 2).backward()


# A warm-up is native, then compression sets in


# A unit's warm-up is its longest.
WARMUP = {
    "schema": 1,
    "gradients": [
        {"when": {"name": name}, "codec": {"kind": "sketch", "density": 0.2, "warmup_steps": steps}}
        for name, steps in (("*weight", 3), ("*", 1))
    ],
}


@on_ranks(2)
def test_warmup_is_native_and_then_over(rank: int, world_size: int) -> None:
    native, wrapped = sharded(), tagc.wrap(sharded(), WARMUP)
    assert "after 3 uncompressed steps" in str(tagc.compressor(wrapped).plan())
    torch.testing.assert_close(train(wrapped, rank, 3), train(native, rank, 3), **EXACT)
    metrics = tagc.compressor(wrapped).metrics()
    assert metrics.wire_bytes == metrics.dense_bytes == tagc.compressor(wrapped).wire_bytes
    assert metrics.compressed_wire_bytes == metrics.compressed_dense_bytes
    assert metrics.residual_norm == 0

    loss_of(wrapped, rank, 3).backward()
    after = tagc.compressor(wrapped).metrics()
    assert after.steps == 4
    assert 0 < after.density < 1
    assert after.residual_norm > 0


# A copy of a model that tagc compresses is a plain model


def copies(model: nn.Module) -> list[nn.Module]:
    saved = io.BytesIO()
    torch.save(model, saved)
    assert b"tagc." not in saved.getvalue()  # so it loads where tagc is not installed
    saved.seek(0)
    return [
        deepcopy(model),
        AveragedModel(model).module,
        torch.load(saved, weights_only=False),
        deepcopy(deepcopy(model)),
    ]


def gradients(model: nn.Module, rank: int) -> Any:
    model.zero_grad()
    loss_of(model, rank, 0).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@on_ranks(2)
@pytest.mark.parametrize("removed", [False, True])
def test_of_a_wrapped_ddp(rank: int, world_size: int, removed: bool) -> None:
    model = DistributedDataParallel(net())
    expected = gradients(DistributedDataParallel(net()), rank)
    tagc.wrap(model, {"schema": 1, "gradients": [FOUR_BITS]})
    if removed:
        tagc.compressor(model).remove()
    for copy in copies(model):
        equal(gradients(copy, rank), expected)
        tagc.wrap(copy, {"schema": 1, "gradients": [FOUR_BITS]})
        tagc.compressor(copy).remove()


@on_ranks(2)
def test_of_a_model_in_sites(rank: int, world_size: int) -> None:
    """Nothing of a copy is exchanged, and what is loaded into it does not count."""
    model = net()
    optimizer = adam(model)
    handle = tagc.sites(model, optimizer, policy(every=2))
    train_site(model, optimizer, rank, range(1))
    weights = local_weights(model)
    for copy in copies(model):
        equal(local_weights(copy), weights)
        copy.load_state_dict(net().state_dict())
        train_site(copy, adam(copy), rank, range(3))
        tagc.sites(copy, adam(copy), policy()).remove()
    assert handle.metrics().exchanges == 0
    train_site(model, optimizer, rank, range(1, 2))
    assert handle.metrics().exchanges == 1

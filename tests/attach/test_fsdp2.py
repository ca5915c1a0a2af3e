"""FSDP2: its numbers and names, its life, and where its options need more than the comparison of
sums with native FSDP2 in `tests/parity`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

import tagc
from parity.model import loss_of
from parity.option import wrap_blocks
from support import small_net
from support.block_net import net, sharded, wrap
from support.counting import counted_bytes
from support.distributed import on_ranks
from support.exact import EXACT, equal
from support.gathering import INT8, gathering
from support.launching import sketch_of
from support.small_net import EVERYTHING, local_weights
from support.units import gathered, policy
from tagc.attach.fsdp2 import param_dtype, reduce_dtype
from tagc.attach.fsdp2_collectives import _params_of


@on_ranks(1)
def test_one_rank_warns_and_changes_nothing(rank: int, world_size: int) -> None:
    native, wrapped = small_net.sharded(), small_net.sharded()
    with pytest.warns(UserWarning, match="does nothing at world size 1") as caught:
        assert tagc.wrap(wrapped, EVERYTHING) is wrapped
    assert {warning.filename for warning in caught} == {__file__}  # the user's own line
    torch.testing.assert_close(
        small_net.train(wrapped, rank, 2), small_net.train(native, rank, 2), **EXACT
    )
    assert tagc.compressor(wrapped).metrics().wire_bytes == 0


@on_ranks(2)
def test_implementations_train_alike(rank: int, world_size: int) -> None:
    """To the last bit; and the ranks keep equal thresholds and seeds."""
    results = []
    for ops in ("cpu", "reference"):
        model = tagc.wrap(small_net.sharded(), EVERYTHING, ops=ops)
        small_net.train(model, rank, 3)
        results.append(local_weights(model))
        for reducer in tagc.compressor(model).reducers:
            sketch = sketch_of(reducer)
            for shared in (sketch.threshold, sketch.boost, sketch.seed):
                everyones = gathered(shared)
                assert (everyones.view(torch.int32) == everyones.view(torch.int32)[0]).all()
        assert tagc.compressor(model).metrics().unresolved == 0
    equal(*results)


# Numbers and names


@on_ranks(3)
def test_wire_bytes(rank: int, world_size: int) -> None:
    """Counted three ways: by the metrics, by the plan and from the tensors that collectives get."""
    model = small_net.sharded()
    tagc.wrap(model, policy(({"name": "*.weight"}, 0.05), ({"name": "second.*.bias"}, 0.5)))
    compressor = tagc.compressor(model)
    small_net.loss_of(model, rank, 0).backward()
    before = compressor.metrics()
    with counted_bytes() as handed:
        for step in range(3):
            small_net.loss_of(model, rank, step).backward()
    after, rows = compressor.metrics(), compressor.plan().rows
    compressed = [row for row in rows if row.codec != "dense"]
    wire = after.wire_bytes - before.wire_bytes
    assert wire == sum(handed)
    # A segment's bytes are split among its parameters in floats.
    assert 3 * sum(row.wire_bytes for row in rows) == pytest.approx(wire, rel=1e-12)
    sent = after.compressed_wire_bytes - before.compressed_wire_bytes
    assert 3 * sum(row.wire_bytes for row in compressed) == pytest.approx(sent, rel=1e-12)
    assert after.dense_bytes - before.dense_bytes == 3 * sum(row.dense_bytes for row in rows)
    sent = after.compressed_dense_bytes - before.compressed_dense_bytes
    assert sent == 3 * sum(row.dense_bytes for row in compressed)
    held = sum(r.nbytes for reducer in compressor.reducers for r in reducer.residuals.values())
    assert sum(row.stored_bytes for row in rows) == pytest.approx(held, rel=1e-12)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(row.param for row in rows) == sorted(names)
    assert all(f" {name} " in compressor.plan().full for name in names)


@on_ranks(2)
def test_profiler_ranges_name_the_unit(rank: int, world_size: int) -> None:
    model = tagc.wrap(small_net.sharded(), EVERYTHING)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        small_net.loss_of(model, rank, 0).backward()
    names = {event.key for event in profiler.key_averages()}
    for unit in ("first.2", "first", "second", "(root)"):
        for stage in ("encode", "exchange", "decode"):
            assert f"TAGC::{stage} ({unit})" in names


@on_ranks(2)
def test_wrappers_do_not_show_in_names(rank: int, world_size: int) -> None:
    """A policy is about the model, whoever recomputes or compiles parts of it."""
    plain, wrapped = net(), net()
    wrap_blocks(wrapped)
    wrapped.head = torch.compile(wrapped.head, backend="eager")
    rows = [
        [row.param for row in tagc.compressor(wrap(sharded(m))).plan().rows]
        for m in (plain, wrapped)
    ]
    assert rows[0] == rows[1]
    assert "blocks.1.down.weight" in rows[1]
    units = tagc.compressor(wrapped).plan().units
    assert [unit.info.name for unit in units] == ["", "blocks.0", "blocks.1"]


@on_ranks(2)
def test_this_torch_tells_what_a_backward_reached(rank: int, world_size: int) -> None:
    """It does not by design: the list is a variable of its `foreach_reduce`."""
    model = sharded(net(extra=True))
    with mock.patch("tagc.attach.fsdp2_collectives._params_of", side_effect=_params_of) as look:
        wrap(model, EVERYTHING)
        loss_of(model, rank, 0).backward()
    # For its input and its output, in three units.
    names = [call.args[0].f_code.co_name for call in look.call_args_list]
    assert names == 6 * ["foreach_reduce"]


@on_ranks(2)
def test_one_dtype_that_cannot_be_compressed(rank: int, world_size: int) -> None:
    model = net()
    model.blocks[1].double()
    model = sharded(model)
    with pytest.raises(tagc.PolicyError) as caught:
        wrap(model)
    text = str(caught.value)
    assert "unit 'blocks.1' reduces gradients of torch.float64" in text
    assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in text
    assert "blocks.1.up.weight" in text

    spared = {"when": {"name": "blocks.0.*.weight"}, "codec": {"kind": "quantized", "bits": 4}}
    wrap(model, {"schema": 1, "gradients": [spared]})
    rows = tagc.compressor(model).plan().rows
    assert {row.codec for row in rows if row.unit == "blocks.1"} == {"dense"}

    parameters = gathering(INT8, "blocks.1.*.weight")
    with pytest.raises(
        tagc.PolicyError, match=r"gathers parameters of torch\.float64.*param_dtype"
    ):
        wrap(sharded(net().double()), parameters)


def test_dtypes_where_each_parameter_has_a_policy() -> None:
    """As from torch 2.15 on, whose reductions are in the gradients' dtype if no other is asked for;
    before, a group has one policy, and reduces in the dtype of its parameters."""

    def param(grad: torch.dtype | None, *, trains: bool = True, **policy: Any) -> SimpleNamespace:
        sharded_param = SimpleNamespace(requires_grad=trains, dtype=torch.float32)
        mixed = MixedPrecisionPolicy(**policy)
        return SimpleNamespace(
            sharded_param=sharded_param, mp_policy=mixed, sharded_grad_dtype=grad
        )

    half: dict[str, Any] = {"param_dtype": torch.bfloat16}
    one = param(torch.float32, **half)
    frozen = param(torch.bfloat16, trains=False)
    group = SimpleNamespace(fsdp_params=[frozen, one])
    assert reduce_dtype("unit", group) == torch.float32
    assert param_dtype(one, group) == torch.bfloat16
    assert param_dtype(frozen, group) is None
    group.mp_policy = one.mp_policy
    assert reduce_dtype("unit", group) == torch.bfloat16
    assert param_dtype(frozen, group) == torch.bfloat16

    asked = param(torch.float32, reduce_dtype=torch.float16, **half)
    assert reduce_dtype("unit", SimpleNamespace(fsdp_params=[asked])) == torch.float16
    for other in (torch.bfloat16, None):
        several = SimpleNamespace(fsdp_params=[one, param(other)])
        with pytest.raises(ValueError, match=r"of 'unit' have several dtypes.*fully_shard on"):
            reduce_dtype("unit", several)

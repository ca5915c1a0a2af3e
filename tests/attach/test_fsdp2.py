"""FSDP2 with compressed gradients, on 1 to 4 ranks, against formulas and against FSDP itself."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import tagc
from support.counting import counted_bytes
from support.distributed import on_ranks
from support.exact import EXACT
from support.launching import sketch_of
from support.marks import covering, slow
from support.paths import EXAMPLES
from support.small_net import EVERYTHING, local_grads, local_weights, loss_of, net, sharded, train
from support.units import gathered, policy
from tagc.codecs.sketch import SketchPlan
from tagc.collect import UnitReducer
from tagc.policy import Policy

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
INTEGER = ("int8x4", "int16x2", "int32x1")


@contextmanager
def recorded(calls: list[tuple[UnitReducer, Tensor, Tensor]]) -> Iterator[None]:
    """Notes every unit's input and output. Enter it before `tagc.wrap`."""
    original = UnitReducer.reduce

    def reduce(
        self: UnitReducer, out: Tensor, inp: Tensor, group: Any, op: Any, **how: Any
    ) -> None:
        before = inp.clone()
        original(self, out, inp, group, op, **how)
        calls.append((self, before, out.clone()))

    with patch.object(UnitReducer, "reduce", reduce):
        yield


# FSDP's own results


NATIVE: dict[str, tuple[dict, Callable[[Any], None]]] = {
    "average": ({}, lambda model: None),
    "sum": ({}, lambda model: model.set_force_sum_reduction_for_comms(True)),
    "bfloat16": (
        {
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
            )
        },
        lambda model: None,
    ),
}


def native_and_wrapped(variant: str, chosen: str | Policy) -> tuple[Any, Any]:
    options, configure = NATIVE[variant]
    native, wrapped = sharded(**options), sharded(**options)
    for model in (native, wrapped):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                configure(module)
    with warnings.catch_warnings():
        # Units as small as these may well cost more compressed.
        warnings.simplefilter("ignore")
        return native, tagc.wrap(wrapped, chosen)


@pytest.mark.some(1)
@on_ranks()
@pytest.mark.parametrize(("world_size", "variant"), covering((2, 3, 4), NATIVE))
def test_dense_is_native(rank: int, world_size: int, variant: str) -> None:
    native, wrapped = native_and_wrapped(variant, "dense")
    torch.testing.assert_close(train(wrapped, rank, 3), train(native, rank, 3), **EXACT)
    torch.testing.assert_close(local_weights(wrapped), local_weights(native), **EXACT)


@pytest.mark.some(1)
@on_ranks()
@pytest.mark.parametrize(("world_size", "variant"), covering((2, 3, 4), NATIVE))
def test_unselected_columns_are_native(rank: int, world_size: int, variant: str) -> None:
    native, wrapped = native_and_wrapped(variant, policy(({"name": "second.0.weight"}, 0.1)))
    (mine,), (theirs,) = train(wrapped, rank, 1), train(native, rank, 1)
    assert not torch.equal(mine.pop("second.0.weight"), theirs.pop("second.0.weight"))
    # Two numbers add to the same sum in either order; more need not, where columns moved.
    wide: Any = {"rtol": 0.02, "atol": 0.1} if variant == "bfloat16" else {}
    bound = EXACT if world_size == 2 else wide
    torch.testing.assert_close(mine, theirs, **bound)


@on_ranks(2)
def test_biases_are_dense_unless_named(rank: int, world_size: int) -> None:
    native, wrapped = native_and_wrapped("average", policy(({"min_numel": 1}, 0.1)))
    (mine,), (theirs,) = train(wrapped, rank, 1), train(native, rank, 1)
    for name, grad in mine.items():
        vector = name.endswith("bias") or name.startswith("norm")
        # The shard of a parameter with one row is empty on the other rank.
        assert torch.equal(grad, theirs[name]) == (vector or grad.numel() == 0), name

    native, wrapped = native_and_wrapped("average", policy(({"name": "*.0.bias"}, 0.1)))
    codecs = {row.param: row.codec for row in tagc.compressor(wrapped).plan().rows}
    sketched = {name for name, codec in codecs.items() if codec != "dense"}
    assert sketched == {"first.0.bias", "second.0.bias"}
    (mine,), (theirs,) = train(wrapped, rank, 1), train(native, rank, 1)
    assert {name for name in mine if not torch.equal(mine[name], theirs[name])} == sketched


@on_ranks(2, slow(4))
def test_remove_gives_native_back(rank: int, world_size: int) -> None:
    native, wrapped = native_and_wrapped("average", EVERYTHING)
    loss_of(wrapped, rank, 0).backward()
    wrapped.zero_grad()
    tagc.compressor(wrapped).remove()
    with pytest.raises(ValueError, match="not wrapped"):
        tagc.compressor(wrapped)
    torch.testing.assert_close(train(wrapped, rank, 3), train(native, rank, 3), **EXACT)

    tagc.wrap(wrapped, EVERYTHING)
    loss_of(wrapped, rank, 0).backward()
    assert tagc.compressor(wrapped).metrics().steps == 1
    loss_of(native, rank, 0).backward()
    name = "second.0.weight"
    assert not torch.equal(local_grads(wrapped)[name], local_grads(native)[name])


@on_ranks(1)
def test_one_rank_warns_and_changes_nothing(rank: int, world_size: int) -> None:
    native, wrapped = sharded(), sharded()
    with pytest.warns(UserWarning, match="does nothing at world size 1") as caught:
        assert tagc.wrap(wrapped, EVERYTHING) is wrapped
    assert {warning.filename for warning in caught} == {__file__}  # the user's own line
    torch.testing.assert_close(train(wrapped, rank, 2), train(native, rank, 2), **EXACT)
    assert tagc.compressor(wrapped).metrics().wire_bytes == 0


# The reduction of one unit, against formulas


@on_ranks(2, slow(3), 4)
def test_units_are_handed_the_columns_of_their_parameters(rank: int, world_size: int) -> None:
    """What FSDP hands to a unit are this rank's own gradients where the plan says; what the unit
    returns are the gradients that the optimizer sees."""
    calls: list[tuple[UnitReducer, Tensor, Tensor]] = []
    alone, model = net(), sharded()
    with recorded(calls):
        tagc.wrap(model, EVERYTHING)
    loss_of(alone, rank, 0).backward()
    loss_of(model, rank, 0).backward()
    check_columns(calls, alone, local_grads(model), world_size)


def check_columns(calls: list, alone: nn.Module, mine: dict[str, Tensor], world_size: int) -> None:
    grads = {name: p.grad for name, p in alone.named_parameters()}
    seen = set()
    for reducer, inp, out in calls:
        at = 0
        for segment in reducer.plan.segments:
            for param in segment.params:
                grad = grads[param.name]
                assert grad is not None
                assert tuple(grad.shape) == param.shape
                padded = torch.zeros(world_size * param.columns)
                rows = math.ceil(len(grad) / world_size)
                padded[: grad.numel()] = grad.flatten()
                assert param.columns == rows * grad[0].numel()
                columns = slice(at, at + param.columns)
                torch.testing.assert_close(
                    inp.view(world_size, -1)[:, columns].flatten(), padded, **EXACT
                )
                shard = mine[param.name].flatten()
                torch.testing.assert_close(shard, out[columns][: shard.numel()], **EXACT)
                at += param.columns
                seen.add(param.name)
    assert seen == set(grads)


@on_ranks(slow(2), 3, slow(4))
def test_accumulated_micro_batches_are_reduced_once(rank: int, world_size: int) -> None:
    calls: list[tuple[UnitReducer, Tensor, Tensor]] = []
    alone, model = net(), sharded()
    with recorded(calls):
        tagc.wrap(model, EVERYTHING)
    for step in range(3):
        calls.clear()
        alone.zero_grad()
        model.zero_grad()
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            loss_of(alone, rank, 3 * step + micro).backward()
            assert not calls
            loss_of(model, rank, 3 * step + micro).backward()
        check_columns(calls, alone, local_grads(model), world_size)
        assert tagc.compressor(model).metrics().steps == step + 1


@on_ranks(2, slow(3), slow(4))
def test_training_is_reproducible(rank: int, world_size: int) -> None:
    """Two runs, and two implementations, give the same weights to the last bit; and the ranks
    keep equal thresholds and seeds."""
    results = []
    for ops in ("cpu", "cpu", "reference"):
        model = tagc.wrap(sharded(), EVERYTHING, ops=ops)
        train(model, rank, 6)
        results.append(local_weights(model))
        for reducer in tagc.compressor(model).reducers:
            sketch = sketch_of(reducer)
            for shared in (sketch.threshold, sketch.boost, sketch.seed):
                everyones = gathered(shared)
                assert (everyones.view(torch.int32) == everyones.view(torch.int32)[0]).all()
        assert tagc.compressor(model).metrics().unresolved == 0
    torch.testing.assert_close(results[1], results[0], **EXACT)
    torch.testing.assert_close(results[2], results[0], **EXACT)
    assert not torch.equal(
        results[0]["second.0.weight"], local_weights(sharded())["second.0.weight"]
    )


@on_ranks(2)
@pytest.mark.parametrize("density", [slow(0.02), slow(0.1), slow(0.2)])
def test_density_follows_the_target(rank: int, world_size: int, density: float) -> None:
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model: Any = GPT(GPTConfig(context=32, width=80, layers=2, heads=2))
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    tagc.wrap(model, policy(({"role": ["attention", "mlp", "head"], "min_numel": 1}, density)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    kept = {}
    for step in range(31):
        m = tagc.compressor(model).metrics()
        kept[step] = m.density * m.steps
        if step == 30:
            break
        start = torch.randint(len(text) - 33, (8, 1), generator=generator) + torch.arange(33)
        model(text[start][:, :-1], text[start][:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    realized = (kept[30] - kept[20]) / 10
    assert abs(realized / density - 1) < 0.1, realized


# Numbers and names


@on_ranks(2, 3, slow(4))
def test_wire_bytes(rank: int, world_size: int) -> None:
    """Counted three ways: by the metrics, by the plan and from the tensors that collectives get.

    All are whole numbers of bytes a step, so nothing is off by any rounding."""
    model = sharded()
    tagc.wrap(model, policy(({"name": "*.weight"}, 0.05), ({"name": "second.*.bias"}, 0.5)))
    compressor = tagc.compressor(model)
    plan, W = compressor.plan(), world_size
    loss_of(model, rank, 0).backward()
    before = compressor.metrics()
    with counted_bytes() as handed:
        for step in range(3):
            loss_of(model, rank, step).backward()
    after = compressor.metrics()
    wire = after.wire_bytes - before.wire_bytes

    formula = dense = 0
    for unit in plan.units:
        dense += (W - 1) * unit.columns * 4
        message = cells = counts = 0
        for segment in unit.segments:
            words = segment.columns
            if isinstance(segment.codec, SketchPlan):
                layout = segment.codec.layout
                words = math.ceil(math.ceil(words / layout.symbol.lanes) / 32) + 1
                cells += 4 * math.ceil(layout.hashes * layout.partition / 4)
                counts += 2 * 4
            message += 4 * math.ceil(words / 4)
        # A stamp is behind the segments of a message, which starts at a multiple of 32 words.
        message = 32 * math.ceil((message + 2) / 32) if unit.compressed else unit.columns
        formula += 4 * (W - 1) * (message + cells + counts)
    assert wire == 3 * formula == sum(handed)
    assert after.dense_bytes - before.dense_bytes == 3 * dense
    # A segment's bytes are split among its parameters in floats.
    rows = plan.rows
    assert sum(row.wire_bytes for row in rows) == pytest.approx(formula, rel=1e-12)
    assert sum(row.dense_bytes for row in rows) == dense
    held = [r for reducer in compressor.reducers for r in reducer.residuals.values()]
    residual = sum(r.numel() * r.element_size() for r in held)
    assert sum(row.stored_bytes for row in rows) == pytest.approx(residual, rel=1e-12)
    compressed = sum(row.dense_bytes for row in rows if row.codec != "dense")
    assert after.compressed_dense_bytes - before.compressed_dense_bytes == 3 * compressed
    sketches = sum(row.wire_bytes for row in rows if row.codec != "dense")
    assert after.compressed_wire_bytes - before.compressed_wire_bytes == pytest.approx(
        3 * sketches, rel=1e-12
    )
    names = {name for name, _ in model.named_parameters()}
    assert {row.param for row in rows} == names
    assert len(rows) == len(names)
    assert all(f" {name} " in plan.full for name in names)


@on_ranks(2)
def test_profiler_ranges_name_the_unit(rank: int, world_size: int) -> None:
    model = tagc.wrap(sharded(), EVERYTHING)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_of(model, rank, 0).backward()
    names = {event.key for event in profiler.key_averages()}
    for unit in ("first.2", "first", "second", "(root)"):
        for stage in ("encode", "exchange", "decode"):
            assert f"TAGC::{stage} ({unit})" in names

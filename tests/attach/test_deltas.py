"""Codec ``delta``: parameters as changes against a copy, sent once for every optimizer step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import tagc
from parity.model import loss_of as loss_of_blocks
from support import oracle
from support.block_net import RECOMPUTED, recomputing, wrap
from support.changes import Descent, delta, hosts_of, wrapped
from support.distributed import on_ranks
from support.exact import EXACT
from support.gathering import gathering, recorded
from support.marks import covering, slow
from support.small_net import local_weights, loss_of, sharded, train
from support.units import gathered
from tagc.collect import CopyGatherer
from tagc.plan import bytes_inside


def changed_rows(rows: Tensor, shards: Tensor, bits: int) -> Tensor:
    """The copy after a message in blocks of 32: in float64 but for the roundings of the format."""
    now = rows.clone()
    for row, shard in zip(now, shards, strict=True):
        quantized = oracle.quantize_row((shard.float() - row.float()).numpy(), bits, 32)
        said = oracle.elements_of(quantized, len(row)).astype(np.float64)
        # Exact in float64; float32 rounds the sum once, and the copy's dtype once more.
        row.copy_((row.double() + torch.from_numpy(said)).float())
    return now


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "bits", "dtype"), covering((3, 4), (4, 8), (torch.float32, torch.bfloat16))
)
def test_every_rank_has_the_copy_that_messages_make(
    rank: int, world_size: int, bits: int, dtype: torch.dtype
) -> None:
    """Whole in the first step, then by changes in the forward, and read as it is in backward."""
    calls: list[Any] = []
    mixed = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
    with recorded(calls):
        model = wrapped(delta(bits), hosts_of(world_size), mp_policy=mixed)
        train(model, rank, 3)
    expected: dict[int, Tensor] = {}
    exchanges, lags = 0, []
    for unit, in_backward, inp, out in calls:
        shards, rows = gathered(inp), out.view(world_size, -1)
        before = expected.get(id(unit))
        if before is None:
            expected[id(unit)] = shards
        elif not in_backward:
            now = shards.clone()
            for segment in unit.plan.segments:
                if segment.compressed:
                    span = slice(segment.start, segment.stop)
                    now[:, span] = changed_rows(before[:, span], shards[:, span], bits)
            lags.append(bool((now != shards).any()))
            expected[id(unit)] = now
            exchanges += 1
        assert torch.equal(rows, expected[id(unit)])
    assert exchanges == 2 * len(expected)
    assert any(lags)


@on_ranks(2)
def test_dithered_changes_leave_all_ranks_with_the_same_copy(rank: int, world_size: int) -> None:
    """What is rounded by chance is rounded once, by the owner: all read the same message. No
    element is off by a whole code, where to nearest it would be by half of one."""
    furthest = {}
    for rounding in ("nearest", "stochastic"):
        calls: list[Any] = []
        with recorded(calls):
            model = wrapped(delta(4, rounding=rounding))
            train(model, rank, 4)
        before: dict[int, Tensor] = {}
        off = []
        for unit, in_backward, inp, out in calls:
            rows = out.view(world_size, -1)
            everyones = gathered(rows)
            assert torch.equal(everyones[0], everyones[1])
            if not in_backward:
                own, known = rows[rank], before.get(id(unit))
                for segment in unit.plan.segments:
                    if segment.compressed and known is not None:
                        span = slice(segment.start, segment.stop)
                        wanted = (inp[span] - known[span]).abs()
                        largest = torch.nn.functional.pad(wanted, (0, -len(wanted) % 32))
                        code = largest.view(-1, 32).amax(1).repeat_interleave(32) / 7
                        away = (own[span] - inp[span]).abs()
                        off.append((away / code[: len(away)].clamp(min=1e-20)).max())
                before[id(unit)] = own.clone()
        furthest[rounding] = float(torch.stack(off).max())
    # A scale is rounded by up to 2^-9 of itself, and clips the largest of 7 codes by as much.
    assert furthest["nearest"] <= 0.5 + 8 * 2**-9
    assert 0.5 + 8 * 2**-9 < furthest["stochastic"] <= 1 + 8 * 2**-9


@pytest.mark.some(1)
@on_ranks(2, slow(4))
@pytest.mark.parametrize("bits", [2, 4, slow(8)])
def test_what_a_message_leaves_out_comes_with_the_next(
    rank: int, world_size: int, bits: int
) -> None:
    """An optimizer that changes everything once, and then nothing: the copy catches up."""
    model = wrapped(delta(bits), hosts_of(world_size))
    loss_of(model, rank, 0).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.step()
    optimizer.zero_grad()
    errors = []
    for _ in range(40):
        errors.append(tagc.compressor(model).metrics().parameter_error)
        with torch.no_grad():
            loss_of(model, rank, 0)
        model.reshard()  # FSDP's root keeps its parameters after a forward
        optimizer.step()
    assert errors[0] > 1e-4 or bits == 8
    assert errors[-1] < (1e-7 if bits > 2 else errors[0] / 4)


@on_ranks()
@pytest.mark.parametrize(("world_size", "reshard"), covering((2, 4), (True, False)))
def test_bytes_are_those_of_the_plan(rank: int, world_size: int, reshard: bool) -> None:
    """Whole once; then a message a step, and nothing in backward or in further forwards."""
    model = wrapped(delta(), hosts_of(world_size), reshard_after_forward=reshard)
    compressor = tagc.compressor(model)
    rows = [row for row in compressor.plan().rows if row.direction == "parameters"]
    planned = sum(row.wire_bytes for row in rows)
    inside = sum(map(bytes_inside, compressor.plan().parameters))
    peers = 2
    whole = (peers - 1) * sum(4 * unit.columns for unit in compressor.plan().parameters)
    train(model, rank, 1)
    assert compressor.parameter_wire_bytes == whole
    for step in (2, 3):
        train(model, rank, 1)
        assert compressor.parameter_wire_bytes == whole + (step - 1) * planned
    assert compressor.metrics().parameter_inside_wire_bytes == 3 * inside
    assert (inside > 0) == (world_size == 4)
    stored = sum(g.copy.nbytes for g in compressor.gatherers if isinstance(g, CopyGatherer))
    assert sum(row.stored_bytes for row in rows) == stored > 0


@on_ranks(2, slow(4))
def test_micro_batches_and_evaluations_send_nothing_more(rank: int, world_size: int) -> None:
    """Three backwards that all reduce, and forwards between them, but one optimizer step."""
    model = wrapped(delta(), hosts_of(world_size))
    plain = wrapped(delta(), hosts_of(world_size))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    compressor = tagc.compressor(model)
    planned = sum(r.wire_bytes for r in compressor.plan().rows if r.direction == "parameters")
    for step in range(4):
        before = compressor.parameter_wire_bytes
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            for micro in range(3):
                if m is model:
                    with torch.no_grad():
                        loss_of(m, rank, 100)
                    m.reshard()
                loss_of(m, rank, 3 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        # Before the first step nobody knows that there is an optimizer.
        if step:
            assert compressor.parameter_wire_bytes - before == planned
        torch.testing.assert_close(local_weights(model), local_weights(plain), **EXACT)


@on_ranks(2)
@pytest.mark.parametrize("how", RECOMPUTED)
def test_a_backward_reads_what_its_forward_did(rank: int, world_size: int, how: str) -> None:
    """In forwards that a backward does once more, too, after reductions of the same unit."""
    calls: list[Any] = []
    with recorded(calls):
        model = wrap(recomputing(how), gathering(delta(), "*.weight"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compressor = tagc.compressor(model)
    planned = sum(r.wire_bytes for r in compressor.plan().rows if r.direction == "parameters")
    for step in range(3):
        calls.clear()
        sent = compressor.parameter_wire_bytes
        loss_of_blocks(model, rank, step).backward()
        all_alike(calls)
        if step:
            assert compressor.parameter_wire_bytes - sent == planned
        optimizer.step()
        optimizer.zero_grad()


def all_alike(calls: list[Any]) -> None:
    """Every gather of a unit gave the same."""
    outs: dict[int, Tensor] = {}
    for unit, _, _, out in calls:
        assert torch.equal(out, outs.setdefault(id(unit), out))
    assert len(calls) > len(outs) > 0


@on_ranks(2)
@pytest.mark.parametrize("how", ["around", "reentrant around"])
def test_two_forwards_before_their_backwards(rank: int, world_size: int, how: str) -> None:
    """The second backward recomputes after the first one has reduced."""
    calls: list[Any] = []
    with recorded(calls):
        model = wrap(recomputing(how), gathering(delta(), "*.weight"))
        optimizer = Descent(model)
        for step in range(3):
            calls.clear()
            losses = [loss_of_blocks(model, rank, 2 * step + i) for i in range(2)]
            for loss in reversed(losses):
                loss.backward()
            all_alike(calls)
            optimizer.step()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


@on_ranks(2)
def test_evaluation_in_inference_mode(rank: int, world_size: int) -> None:
    model, other = wrapped(delta()), wrapped(delta())
    for _ in range(3):
        # (FSDP itself cannot train after a first forward in inference mode.)
        train(model, rank, 1)
        train(other, rank, 1)
        for _ in range(2):  # what the step changed, and nothing
            with torch.inference_mode():
                loss_of(model, rank, 100)
            model.reshard()
    torch.testing.assert_close(local_weights(model), local_weights(other), **EXACT)


@on_ranks(2)
def test_not_finite_parameters_are_visible(rank: int, world_size: int) -> None:
    model = wrapped(delta())
    train(model, rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        model.head.weight.to_local().fill_(float("nan"))
    optimizer.step()
    assert bool(loss_of(model, rank, 3).isnan())


def test_what_a_policy_cannot_ask_for() -> None:
    rule = {"when": {}, "codec": {"kind": "delta"}}
    with pytest.raises(tagc.PolicyError, match="unknown value 'delta'"):
        tagc.Policy.load({"schema": 1, "gradients": [rule]})
    bits = {"when": {}, "codec": {"kind": "delta", "bits": 3}}
    with pytest.raises(tagc.PolicyError, match="unknown value 3; did you mean 4 or 2"):
        tagc.Policy.load({"schema": 1, "gradients": [rule], "parameters": [bits]})


@on_ranks(2)
def test_vectors_have_no_rows_and_columns(rank: int, world_size: int) -> None:
    with pytest.raises(tagc.PolicyError, match=r"codec 'delta' with bits 2 .* norm\.weight"):
        tagc.wrap(sharded(), gathering(delta(2), "norm.weight"), hosts=None)

"""Steps in a CUDA graph: its replays have the bits of steps that run, without a line of Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import tagc
from support.block_net import wrap
from support.distributed import on_ranks
from support.exact import equal
from support.marks import slow
from support.small_net import local_weights
from support.tape import Tape, tapes
from support.uneven_block import SHIPPED, Block, data, end_warm_up, sharded
from tagc.collect import gauge
from tagc.collect.replay import Store

LONG = ("hybrid", "hosts", "attn-only", "one-bit", "stateless", "thrifty")
RUN = 2  # steps before the capture
CAPTURING = patch.object(Store, "capturing", True)

QUANTIZED = {"kind": "quantized", "bits": 4, "block": 32}


def gradients(codec: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "gradients": [{"when": {"name": "*.weight"}, "codec": codec}]}


# All that a step may count, draw or measure: resets, seeds, thresholds and changes.
MANY = {
    "schema": 1,
    "gradients": [
        {
            "when": {"name": "*.q_proj.weight"},
            "codec": QUANTIZED,
            "feedback": {"kind": "average", "reset_steps": 3},
        },
        {"when": {"name": "*.o_proj.weight"}, "codec": QUANTIZED | {"rounding": "stochastic"}},
        {
            "when": {"name": "*.up_proj.weight"},
            "codec": {"kind": "matrix", "level": 1.3},
            "feedback": {"kind": "residual", "dtype": "bfloat16", "lead": 0.8},
        },
        {"when": {"name": "*.down_proj.weight"}, "codec": {"kind": "sketch", "density": 0.3}},
    ],
    "parameters": [{"when": {"name": "*_proj.weight"}, "codec": {"kind": "delta", "bits": 2}}],
}


def once(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def in_parts(model: Any, x: Tensor) -> Tensor:
    """The second block's parameters get their gradients in two backwards."""
    between = model.layers[0](x)
    cut = between.detach().requires_grad_()
    halves = [model.layers[1](half).square().mean() for half in cut.chunk(2)]
    for half in halves:
        half.backward()
    between.backward(cut.grad)
    return halves[0] + halves[1]


class Run:
    """Trains a model; between the steps may happen whatever a subclass does there.

    Attributes:
        captured: whether most steps are replays of a graph.
    """

    step_of: Callable[[Any, Tensor], Tensor] = staticmethod(once)
    eager: tuple[int, ...] = ()

    def __init__(self, rank: int, policy: Any, *, captured: bool, **how: Any) -> None:
        self.rank, self.captured = rank, captured
        self.model = wrap(sharded(policy), policy, **how)
        self.handle = tagc.compressor(self.model)
        end_warm_up(self.handle)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def before(self, step: int) -> None: ...

    def after(self, step: int) -> None:
        self.optimizer.step()

    def result(self, steps: int) -> dict[str, Any]:
        """Losses, weights, bytes and all that tagc saves."""
        tape, x, losses = Tape(), torch.empty(5, 131), []
        loss = torch.empty(())
        for step in range(steps):
            x.copy_(data(self.rank, step))
            self.before(step)
            if self.captured and step > RUN and step not in self.eager:
                self.handle.before_replay()
                tape.play()
            elif self.captured and step == RUN:
                self.handle.before_capture()
                with tape:
                    loss = self.step_of(self.model, x)
            else:
                self.step_of(self.model, x)
            losses.append(loss.detach().clone())
            self.after(step)
            self.optimizer.zero_grad(set_to_none=False)
        h = self.handle
        sent = [h.wire_bytes, h.parameter_wire_bytes, sum(g.dense_bytes for g in h.gatherers)]
        return local_weights(self.model) | dict(h.state_dict()) | {"sent": torch.tensor(sent)}


def same(rank: int, policy: Any, replays: int, kind: type[Run] = Run, hosts: Any = None) -> None:
    """Compare a run with replays with one without."""
    with tapes():
        steps = RUN + 1 + replays
        expected = kind(rank, policy, captured=False, hosts=hosts).result(steps)
        equal(kind(rank, policy, captured=True, hosts=hosts).result(steps), expected)


@on_ranks(timeout=900)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("world_size", "policy", "hosts", "replays"),
    [
        (2, "hosts", None, 3),
        slow(4, "thrifty", 2, 2),
        *(slow(2, p, None, 50 if p in LONG else 4) for p in SHIPPED),
    ],
)
def test_replays_have_the_bits_of_steps(
    rank: int, world_size: int, policy: str, hosts: Any, replays: int
) -> None:
    same(rank, policy, replays, hosts=hosts)


class Mixed(Run):
    """Between replays: a skipped step, evaluations, steps that run, another loss scale, weights
    that change without an optimizer, a load, and a step without an update."""

    eager = (RUN + 3, RUN + 4)

    def __init__(self, rank: int, policy: Any, **how: Any) -> None:
        super().__init__(rank, policy, **how)
        self.handle.keep_rates(self.optimizer)

    def before(self, step: int) -> None:
        if step == RUN + 2:
            with torch.no_grad():
                self.model(data(self.rank, 99))
        if step == RUN + 5:
            self.handle.scale_residuals(0.5)
        if step == RUN + 6:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(0.5)
            self.handle.refresh()
        if step == RUN + 7:
            self.handle.load_state_dict(dict(self.handle.state_dict()))
        self.copy = self.handle.copy_residuals()

    def after(self, step: int) -> None:
        if step == RUN + 1:
            self.handle.restore_residuals(self.copy)
        elif step != RUN + 7:
            self.optimizer.step()


class InParts(Run):
    step_of = staticmethod(in_parts)


@on_ranks(4, timeout=200)
def test_what_happens_between_replays(rank: int, world_size: int) -> None:
    # After four steps, noise is measured in every other one.
    with patch.multiple(gauge, _FIRST=4, _EVERY=2):
        same(rank, MANY, 8, Mixed, hosts=2)
    same(rank, gradients(QUANTIZED | {"rounding": "stochastic"}), 2, InParts)


# Refusals


def step(model: Any, rank: int) -> Tensor:
    return once(model, data(rank, 0))


@on_ranks(2)
def test_what_a_graph_cannot_hold(rank: int, world_size: int) -> None:
    warm = gradients({"kind": "sketch", "density": 0.3, "warmup_steps": 2})
    with tapes():
        model = wrap(sharded(warm), warm, hosts=None)
        handle = tagc.compressor(model)
        start = deepcopy(dict(handle.state_dict()))
        for left in (3, 2, 1):
            assert handle.steps_before_capture == left
            with pytest.raises(RuntimeError, match=f"{left} more steps must run"):
                handle.before_capture()
            step(model, rank)
        with pytest.raises(RuntimeError, match="no CUDA graph was captured"):
            handle.before_replay()
        handle.before_capture()
        with Tape():
            step(model, rank)
        handle.before_replay()
        handle.load_state_dict(start)
        with pytest.raises(RuntimeError, match=r"does not hold .*: first run 3 steps"):
            handle.before_replay()
        for _ in range(3):
            step(model, rank)
        handle.before_replay()
        handle.keep_rates(torch.optim.SGD(model.parameters()))
        with pytest.raises(RuntimeError, match=r"does not hold .*: it does not measure noise"):
            handle.before_replay()
        with CAPTURING, pytest.raises(RuntimeError, match="right before the capture"):
            step(model, rank)  # another capture needs another call

        run = Run(rank, "thrifty", captured=False, hosts=None)
        model, handle, optimizer = run.model, run.handle, run.optimizer
        step(model, rank)
        handle.before_capture()
        with Tape() as tape:
            loss = step(model, rank)
        optimizer.step()
        tape.play()  # without the changes: no result, rather than a wrong one
        assert loss.isnan()
        handle.before_capture()
        optimizer.step()
        with CAPTURING, pytest.raises(RuntimeError, match="cannot hold the changes of unit"):
            step(model, rank)

    with patch.dict(os.environ, {"TAGC_DISABLE": "1"}), pytest.warns(UserWarning, match="DISABLE"):
        handle = tagc.compressor(tagc.wrap(sharded("thrifty"), "thrifty"))
    assert not handle.steps_before_capture
    for call in (handle.before_capture, handle.before_replay):
        call()  # the same program runs with and without compression

    replicated: Any = DistributedDataParallel(Block())
    wrap(replicated, gradients(QUANTIZED))
    with pytest.raises(ValueError, match="for FSDP2 only"):
        tagc.compressor(replicated).before_capture()


@on_ranks(4)
def test_micro_batches_that_wait_are_refused(rank: int, world_size: int) -> None:
    policy = gradients(QUANTIZED)
    with tapes():
        model = wrap(sharded(policy), policy, hosts=2)
        step(model, rank)
        tagc.compressor(model).before_capture()
        with Tape():
            step(model, rank)
        model.set_requires_all_reduce(False)
        step(model, rank)
        with pytest.raises(RuntimeError, match=r"does not hold .*: micro-batches wait for a later"):
            tagc.compressor(model).before_replay()
        tagc.compressor(model).before_capture()
        with CAPTURING, pytest.raises(RuntimeError, match="micro-batches wait for a later one"):
            step(model, rank)
    dist.barrier()


@on_ranks(2)
def test_dimensions(rank: int, world_size: int) -> None:
    """What a graph sends in a mesh's dimensions is counted in every replay."""

    def with_rule(name: str, codec: dict[str, Any]) -> tuple[Any, Any]:
        policy = gradients(QUANTIZED) | {"dimensions": {name: {"codec": codec}}}
        mesh = tagc.init_device_mesh("cpu", (2,), mesh_dim_names=(name,), policy=policy)
        return wrap(sharded(policy), policy, hosts=None), mesh.get_group()

    with tapes():
        model, group = with_rule("tp", {"kind": "quantized", "bits": 8})
        handle = tagc.compressor(model)
        step(model, rank)
        handle.before_capture()
        with (
            CAPTURING,
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
            tagc.activations(),
        ):
            step(model, rank)
            dist.all_reduce(torch.ones(1 << 14), group=group)
    sent = handle.metrics().dimensions["tp"]
    assert 0 < sent.wire_bytes < sent.dense_bytes
    handle.before_replay()
    twice = handle.metrics().dimensions["tp"]
    assert (twice.wire_bytes, twice.dense_bytes) == (2 * sent.wire_bytes, 2 * sent.dense_bytes)

    exact = tagc.compressor(with_rule("cp", {"kind": "exact"})[0])
    with pytest.raises(ValueError, match="ranks of dimension 'cp' agree on the size"):
        exact.before_capture()

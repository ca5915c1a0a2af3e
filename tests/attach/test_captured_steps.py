"""Steps in a CUDA graph: its replays have the bits of steps that run, without a line of Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc
from support.block_net import wrap
from support.distributed import on_ranks
from support.exact import equal
from support.gathering import gathered_in
from support.marks import slow
from support.small_net import local_weights
from support.tape import Tape, tapes
from support.uneven_block import Block
from tagc.codecs.sketch.threshold import Steer
from tagc.collect import UnitReducer, gauge, reducer_state
from tagc.collect.replay import Store
from tagc.ops.launches import Advance
from tagc.policy import data_parallel_policies

QUICK = ("hybrid", "hosts", "attn-only")
POLICIES = (*QUICK, "one-bit", "stateless", "thrifty")
OTHERS = sorted({*data_parallel_policies()} - {"auto", *POLICIES})
RUN = 2  # steps before the capture

AVERAGE = {"kind": "average", "reset_steps": 3}
QUANTIZED = {"kind": "quantized", "bits": 4, "block": 32}


def gradients(codec: dict[str, Any], **rule: Any) -> dict[str, Any]:
    when = {"name": "*.weight"}
    return {"schema": 1, "gradients": [{"when": when, "codec": codec, **rule}]}


RESTARTS = gradients(QUANTIZED, feedback=AVERAGE)
DITHERED = gradients(QUANTIZED | {"rounding": "stochastic"})


def sharded(policy: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    model: Any = nn.Sequential(Block(), Block())
    options |= gathered_in(policy) if isinstance(policy, str) else {}
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(5, 131, generator=torch.Generator().manual_seed(10 * step + rank))


def once(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def in_parts(model: Any, x: Tensor) -> Tensor:
    """The second block's parameters get their gradients in two backwards."""
    between = model[0](x)
    cut = between.detach().requires_grad_()
    halves = [model[1](half).square().mean() for half in cut.chunk(2)]
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
    noise = False

    def __init__(self, rank: int, policy: Any, *, captured: bool, **how: Any) -> None:
        self.rank, self.captured = rank, captured
        options = {"mesh": how.pop("mesh")} if "mesh" in how else {}
        self.model = wrap(sharded(policy, **options), policy, **how)
        self.handle = tagc.compressor(self.model)
        for reducer in self.handle.reducers:
            reducer.counters.steps = reducer.plan.warmup_steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if self.noise:
            self.handle.keep_rates(self.optimizer)

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


def same(rank: int, policy: Any, replays: int, kind: type[Run] = Run, **how: Any) -> None:
    """Compare a run with replays with one without."""
    how = {"hosts": None} | how
    with tapes():
        steps = RUN + 1 + replays
        expected = kind(rank, policy, captured=False, **how).result(steps)
        equal(kind(rank, policy, captured=True, **how).result(steps), expected)


@on_ranks(2, timeout=900)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("policy", "replays"),
    [(p, 3) for p in QUICK] + [slow(p, 50) for p in POLICIES] + [slow(p, 4) for p in OTHERS],
)
def test_replays_have_the_bits_of_steps(
    rank: int, world_size: int, policy: str, replays: int
) -> None:
    same(rank, policy, replays)


class Mixed(Run):
    """Evaluations between replays, steps that run, a skipped one, another loss scale."""

    eager = (RUN + 3, RUN + 4)

    def before(self, step: int) -> None:
        if step == RUN + 2:
            with torch.no_grad():
                self.model(data(self.rank, 99))
        if step == RUN + 5:
            self.handle.scale_residuals(0.5)
        self.copy = self.handle.copy_residuals()

    def after(self, step: int) -> None:
        if step == RUN + 1:
            self.handle.restore_residuals(self.copy)
        else:
            self.optimizer.step()


class Refreshed(Run):
    """Weights change without an optimizer, and the state is saved and loaded."""

    def before(self, step: int) -> None:
        if step == RUN + 2:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(0.5)
            self.handle.refresh()
        if step == RUN + 3:
            self.handle.load_state_dict(dict(self.handle.state_dict()))


class InParts(Run):
    step_of = staticmethod(in_parts)


class Noisy(Run):
    noise = True


class Accumulating(Run):
    """Two micro-batches a step, each of which is reduced."""

    def after(self, step: int) -> None:
        if step % 2:
            self.optimizer.step()


CASES: dict[str, tuple[type[Run], Any, int]] = {
    "mixed": (Mixed, "half-bit", 6),
    "mixed, changes": (Mixed, "thrifty", 6),
    "refreshed": (Refreshed, "thrifty", 4),
    "accumulating": (Accumulating, "thrifty", 3),
    "in parts": (InParts, DITHERED, 2),
    "noise": (Noisy, DITHERED, 8),
    "restarts": (Run, RESTARTS, 4),
    "shares": (Run, "half-bit", 8),
}


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("case", CASES)
def test_what_happens_between_replays(rank: int, world_size: int, case: str) -> None:
    kind, policy, replays = CASES[case]
    # After four steps, noise and shares are measured in every other one.
    with (
        patch.multiple(gauge, _FIRST=4, _EVERY=2),
        patch.multiple(reducer_state, _FIRST=4, _EVERY=2),
    ):
        same(rank, policy, replays, kind)


@on_ranks(4, timeout=200)
@pytest.mark.parametrize(
    ("way", "policy"), [slow("hosts", "hybrid"), ("hosts", "thrifty"), slow("replicas", "hybrid")]
)
def test_other_levels(rank: int, world_size: int, way: str, policy: str) -> None:
    how: dict[str, Any] = {"hosts": 2}
    if way == "replicas":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        how = {"mesh": mesh}
    same(rank, policy, 2, **how)


# A step that read what changes on the host


@contextmanager
def host_seeds() -> Iterator[None]:
    """Seeds that the host counts."""
    seeds = count()
    with patch.object(Advance, "run", lambda self, x: x.add_(next(seeds) * 12345)):
        yield


@contextmanager
def host_counts() -> Iterator[None]:
    """Counts that stay where they were in the capture."""
    with patch.object(UnitReducer, "_before_graph", lambda *args, **how: None):
        yield


@contextmanager
def host_thresholds() -> Iterator[None]:
    """Thresholds that the host moves."""
    steps, steer = count(), Steer.bound

    def bound(self: Steer, ops: Any, own: int) -> Any:
        steered = steer(self, ops, own)

        def run(counts: Tensor, goals: Tensor, state: Tensor) -> None:
            steered(counts, goals, state)
            state[0].mul_(1 + next(steps) / 16)

        return run

    with patch.object(Steer, "bound", bound):
        yield


@contextmanager
def host_waits() -> Iterator[None]:
    with patch.object(Advance, "run", lambda self, x: x.add_(int(x[0, 0]) % 7)):
        yield


PLANTED = {
    "seed": (host_seeds, DITHERED),
    "count": (host_counts, RESTARTS),
    "threshold": (host_thresholds, gradients({"kind": "sketch", "density": 0.3})),
    "wait": (host_waits, DITHERED),
}


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("what", PLANTED)
def test_a_step_that_reads_the_host_differs(rank: int, world_size: int, what: str) -> None:
    planted, policy = PLANTED[what]
    with planted(), pytest.raises(AssertionError):
        same(rank, policy, 3)


# Refusals


@contextmanager
def capturing() -> Iterator[None]:
    with patch.object(Store, "capturing", True):
        yield


@on_ranks(2)
def test_what_a_graph_cannot_hold(rank: int, world_size: int) -> None:
    def fails(text: str, call: Callable[[], Any], error: Any = RuntimeError) -> None:
        with pytest.raises(error, match=text):
            call()

    def step(model: Any) -> None:
        once(model, data(rank, 0))

    warm = gradients({"kind": "sketch", "density": 0.3, "warmup_steps": 2})
    with tapes():
        model = wrap(sharded(warm), warm, hosts=None)
        handle = tagc.compressor(model)
        for left in (3, 2, 1):
            assert handle.steps_before_capture == left
            fails(f"{left} more steps must run", handle.before_capture)
            step(model)
        fails("no CUDA graph was captured", handle.before_replay)
        handle.before_capture()
        step(model)  # it runs, so another one needs another call
        with capturing():
            fails("right before the capture", lambda: step(model))

    with tapes():
        run = Run(rank, "thrifty", captured=False, hosts=None)
        model, handle, optimizer = run.model, run.handle, run.optimizer
        step(model)
        handle.before_capture()
        with Tape() as tape:
            loss = once(model, data(rank, 0))
        optimizer.step()
        tape.play()  # without the changes: no result, rather than a wrong one
        assert loss.isnan()
        handle.before_capture()
        optimizer.step()
        with capturing():
            fails("cannot hold the changes of unit", lambda: step(model))

    with patch.dict(os.environ, {"TAGC_DISABLE": "1"}), pytest.warns(UserWarning, match="DISABLE"):
        handle = tagc.compressor(tagc.wrap(sharded("thrifty"), "thrifty"))
    assert not handle.steps_before_capture
    for call in (handle.before_capture, handle.before_replay):
        call()  # the same program runs with and without compression

    replicated: Any = DistributedDataParallel(Block())
    wrap(replicated, gradients(QUANTIZED))
    fails("for FSDP2 only", tagc.compressor(replicated).before_capture, ValueError)


@on_ranks(2)
def test_another_capture_needs_another_call(rank: int, world_size: int) -> None:
    with tapes():
        run = Run(rank, DITHERED, captured=False, hosts=None)
        once(run.model, data(rank, 0))
        run.handle.before_capture()
        with Tape():
            once(run.model, data(rank, 0))
        run.handle.before_replay()
        with capturing(), pytest.raises(RuntimeError, match="right before the capture"):
            once(run.model, data(rank, 0))


@on_ranks(4)
def test_micro_batches_that_wait_are_refused(rank: int, world_size: int) -> None:
    policy = gradients(QUANTIZED)
    with tapes():
        model = wrap(sharded(policy), policy, hosts=2)
        once(model, data(rank, 0))
        model.set_requires_all_reduce(False)
        tagc.compressor(model).before_capture()
        with capturing(), pytest.raises(RuntimeError, match="micro-batches wait for a later one"):
            once(model, data(rank, 0))
    dist.barrier()


@on_ranks(2)
def test_dimensions(rank: int, world_size: int) -> None:
    """What a graph sends in a mesh's dimensions is counted in every replay."""
    coded: dict[str, Any] = {"kind": "quantized", "bits": 8}
    exact = {"kind": "exact"}
    for name, codec in (("tp", coded), ("cp", exact)):
        policy = gradients(QUANTIZED) | {"dimensions": {name: {"codec": codec}}}
        mesh = tagc.init_device_mesh("cpu", (2,), mesh_dim_names=(name,), policy=policy)
        with tapes():
            model = wrap(sharded(policy), policy, hosts=None)
            handle = tagc.compressor(model)
            once(model, data(rank, 0))
            if codec is exact:
                with pytest.raises(ValueError, match="ranks of dimension 'cp' agree on the size"):
                    handle.before_capture()
                break
            handle.before_capture()
            with (
                capturing(),
                patch.object(torch.cuda, "is_available", lambda: True),
                patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
                tagc.activations(),
            ):
                once(model, data(rank, 0))
                dist.all_reduce(torch.ones(1 << 14), group=mesh.get_group())
        sent = handle.metrics().dimensions["tp"]
        assert 0 < sent.wire_bytes < sent.dense_bytes
        handle.before_replay()
        twice = handle.metrics().dimensions["tp"]
        assert (twice.wire_bytes, twice.dense_bytes) == (2 * sent.wire_bytes, 2 * sent.dense_bytes)

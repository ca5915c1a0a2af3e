"""Groups that compress: every collective, to the bit, against arithmetic of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import tagc
from support.coded_mesh import added, coded, mesh_of, policy
from support.distributed import as_on_nccl, fails, on_ranks
from support.marks import slow
from tagc.codecs.rows import ExponentCoder, RowCoder
from tagc.collect.transport import all_gather, reduce_scatter
from tagc.groups.activations import SMALL_MESSAGE
from tagc.groups.mesh import bytes_by_dimension

N = 3 * SMALL_MESSAGE + 40
"""Elements for one rank: not a multiple of a row."""


@on_ranks(2)
def test_stochastic_rounding(rank: int, world_size: int) -> None:
    """Right on average, and the same bits for the same elements."""
    codec = {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"}
    by_chance = policy() | {"dimensions": {"tp": {"codec": codec}}}
    mesh: Any = tagc.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), policy=by_chance)
    turns, means = 16, torch.zeros(N)
    for turn in range(turns):
        t = torch.full((N,), 0.3)
        t[::32] = 7  # the largest of each block, and 7 codes
        t[1] = turn / turns  # other elements, other chance
        found = []
        for _ in range(2):
            out = [torch.empty(N) for _ in range(2)]
            with tagc.activations():
                dist.all_gather(out, t, group=mesh.get_group())
            found.append(torch.stack(out))
        assert torch.equal(*found)
        means += found[0][0] / turns
    # 16 draws of 1 with the chance 0.3 for 247 elements of the first row, whose seed changes: the
    # standard deviation is 0.0073.
    assert abs(means[2:256].mean() - t[2:256].mean()) < 0.025


@on_ranks(3)
def test_bytes(rank: int, world_size: int) -> None:
    """8 bits and a scale of 16 for 64 elements, in whole rows of 8 blocks."""
    group = mesh_of(3, names=("ep",)).get_group()
    rows = 6
    t = torch.randn(3 * rows * 512)
    with tagc.activations():
        dist.all_reduce(t, group=group)
    sent = bytes_by_dimension()["ep"]
    assert sent.wire_bytes == 2 * 2 * rows * 512 * 8.25 / 8
    assert sent.dense_bytes == 2 * 2 * rows * 512 * 4


@on_ranks(2)
def test_refusals(rank: int, world_size: int) -> None:
    """Before any rank sends."""
    options = tagc.dimension_options(policy(), "tp")
    other = tagc.dimension_options(policy(bits=4), "tp")
    for make, kind, part in (
        (
            lambda: dist.new_group(backend="tagc", pg_options=options if rank else other),
            "RuntimeError",
            "tagc compression differs between ranks: rank 0 has",
        ),
        (lambda: dist.new_group(backend="tagc"), "ValueError", "needs to know how to compress"),
        (lambda: tagc.dimension_options("hybrid", "tp"), "PolicyError", "it has: none"),
        (
            lambda: tagc.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), policy="hybrid-3d"),
            "PolicyError",
            "rules for dimensions: tp, cp, pp, ep; the mesh has dp",
        ),
    ):
        found, text = fails(make)
        assert found == kind, text
        assert part in text, text
    mesh_of(2)
    mesh_of(2)
    kind, text = fails(lambda: mesh_of(2, bits=4))
    assert kind == "ValueError", text
    assert "torch cannot tell such meshes apart" in text


WRONG: tuple[Callable[[Tensor, Any], Any], ...] = (
    lambda t, group: all_gather(t.new_empty(2 * N + 2), t, group=group),
    lambda t, group: all_gather(t.new_empty(2 * N).double(), t, group=group),
    lambda t, group: dist.all_gather([t.clone()], t, group=group),
    lambda t, group: reduce_scatter(t, t.new_empty(2 * N + 2), group=group),
    lambda t, group: reduce_scatter(t, t.new_empty(2 * N).bfloat16(), group=group),
    lambda t, group: dist.all_to_all_single(t.clone(), t, [N], [N], group=group),
)
"""What torch's own groups refuse, too."""


@on_ranks(2)
@pytest.mark.parametrize("wrong", range(len(WRONG)))
def test_tensors_that_do_not_fit(rank: int, world_size: int, wrong: int) -> None:
    """Before any rank sends: the next collective gets its own messages."""
    group, t = mesh_of(2).get_group(), torch.randn(N)
    with tagc.activations(), patch.object(group, "_on", side_effect=AssertionError):
        kind, text = fails(lambda: WRONG[wrong](t, group))
    assert kind in ("RuntimeError", "ValueError"), text


@on_ranks(2)
def test_works(rank: int, world_size: int) -> None:
    """One that nobody waits for, one that is polled, one that is waited for twice, and after the
    inference mode in which it started; all of the same messages."""
    group, both = mesh_of(2).get_group(), torch.randn(5, N)
    with tagc.activations(), torch.inference_mode():
        t = both.clone()
        works: list[Any] = [dist.all_reduce(row, group=group, async_op=True) for row in t]
    del works[0], works[2]
    began = time.monotonic()
    while not works[0].is_completed():
        assert time.monotonic() < began + 5
    works[-1].wait()
    works[-1].wait()
    with tagc.activations():
        last = both[0].clone()
        dist.all_reduce(last, group=group)
    assert torch.equal(last, 2 * coded(both[0]))
    for i in (1, 4):
        assert torch.equal(t[i], 2 * coded(both[i]))


@on_ranks(3)
def test_autograd_takes_writes_as_torchs_own(rank: int, world_size: int) -> None:
    """A backward that reads a tensor which was then summed in place is no error."""
    group = mesh_of(world_size).get_group()
    for given in (torch.zeros(3 * N, requires_grad=True), torch.zeros(3 * N - 1).requires_grad_()):
        saved = given.exp()
        with tagc.activations():
            dist.all_reduce(saved, group=group)
        saved.sum().backward()
        assert given.grad is not None
        torch.testing.assert_close(given.grad, torch.full_like(given, 3), rtol=0.01, atol=0)


@on_ranks(2)
def test_sparse_tensors_travel_as_they_are(rank: int, world_size: int) -> None:
    t = torch.randn(4 * N)
    sparse = t.to_sparse()
    with tagc.activations():
        dist.all_reduce(sparse, group=mesh_of(2).get_group())
    assert torch.equal(sparse.to_dense(), 2 * t)


@on_ranks(2)
def test_switched_off(rank: int, world_size: int) -> None:
    with patch.dict("os.environ", TAGC_DISABLE="1"):
        group = mesh_of(2).get_group()
    both = torch.randn(2, 4 * N, generator=torch.Generator().manual_seed(1))
    t = both[rank].clone()
    with tagc.activations():
        dist.all_reduce(t, group=group)
    assert torch.equal(t, both.sum(0))


KINDS = ("all-reduce", "functional", "coalesced", "average", "all-gather", "listed all-gather")
KINDS += ("reduce-scatter", "listed reduce-scatter", "all-to-all", "swap", "barrier")
SIZES = (1, 100, SMALL_MESSAGE - 1, SMALL_MESSAGE, 3 * SMALL_MESSAGE + 40)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int64)
AS_IT_IS = [("maximum", torch.float32), ("all-reduce", torch.float64)]
AS_IT_IS += [(kind, torch.complex64) for kind in ("all-reduce", "all-gather", "all-to-all")]


OPERATIONS = {
    "all-reduce": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "maximum": dist.ReduceOp.MAX,
}


@dataclass(frozen=True)
class Call:
    """One collective; the same on all ranks.

    Attributes:
        sizes: elements that each rank has for each rank.
        activation: whether it is part of a forward.
        bits, block: of what is coded; without bits, codec ``exact``.
        then: how many calls are left in flight after it.
    """

    kind: str
    seed: int
    sizes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    activation: bool
    then: int
    bits: int
    block: int

    def coded(self, t: Tensor) -> Tensor:
        """What arrives of it."""
        return coded(t, self.bits, self.block)

    def inputs(self, rank: int) -> list[Tensor]:
        """What a rank has for each rank; whole numbers where sums must be exact."""
        generator = torch.Generator().manual_seed(self.seed + rank)
        found = []
        for to, n in enumerate(self.sizes[rank]):
            whole = torch.randint(-8, 9, (n,), generator=generator)
            wide = torch.randn(n, generator=generator)
            if not self.bits and (self.seed + rank + to) % 3 == 0:
                # Exponents that cannot be packed, on some ranks and for some receivers.
                wide *= torch.exp2(torch.randint(-60, 60, (n,), generator=generator))
            if self.seed % 4 == 0 and rank == 0:  # not finite, which must stay visible
                wide[n // 2 :: 700] = (torch.nan, torch.inf)[to % 2]
            exact = not self.is_coded(rank, to)
            found.append((whole if exact else wide).to(self.dtype))
        return found

    def is_coded(self, sender: int, receiver: int) -> bool:
        """Whether that part travels as a message."""
        coder = RowCoder if self.bits else ExponentCoder
        if self.dtype not in coder.dtypes or self.kind == "maximum":
            return False
        if not (self.activation or self.kind == "swap"):
            return False
        return self.sizes[sender][receiver] >= SMALL_MESSAGE


def programs(seed: int, ranks: int, length: int, *form: int) -> list[Call]:
    """A random program, and after it activations that travel as they are."""
    draw = random.Random(seed)
    found = []
    for i in range(length):
        kind = draw.choice(KINDS)
        dtype = draw.choice(DTYPES)
        if kind == "average" and dtype is torch.int64:
            dtype = torch.float32  # gloo has no averages of integers
        if kind == "all-to-all":
            sizes = tuple(
                tuple(draw.choice((0, *SIZES)) for _ in range(ranks)) for _ in range(ranks)
            )
        else:
            sizes = ((draw.choice(SIZES),) * ranks,) * ranks
        then = draw.randrange(4)
        found.append(Call(kind, 1000 * i + seed, sizes, dtype, draw.random() < 0.7, then, *form))
    sizes = ((N,) * ranks,) * ranks
    return found + [Call(kind, seed, sizes, dtype, True, 0, *form) for kind, dtype in AS_IT_IS]


def start(
    call: Call, rank: int, group: Any
) -> tuple[Any, list[Tensor], list[Tensor], list[Tensor]]:
    """Start a call: its work, inputs, outputs, and what these must become."""
    W = len(call.sizes)
    everything = [call.inputs(r) for r in range(W)]
    mine = everything[rank]

    def arrives(sender: int, receiver: int) -> Tensor:
        t = everything[sender][receiver]
        return call.coded(t) if call.is_coded(sender, receiver) else t

    inputs = [t.clone() for t in mine]
    if call.kind in OPERATIONS:
        out, op = torch.cat(inputs), OPERATIONS[call.kind]
        expected = _sum(call, everything, W)
        return dist.all_reduce(out, op, group=group, async_op=True), [], [out], [expected]
    if call.kind == "functional":
        out = functional.all_reduce(torch.cat(inputs), "sum", group)
        return [], [], [out], [_sum(call, everything, W)]
    if call.kind == "coalesced":
        outs = [torch.cat(inputs), torch.cat(inputs)]
        with pytest.warns(FutureWarning):
            dist.all_reduce_coalesced(outs, group=group)
        return [], [], outs, 2 * [_sum(call, everything, W)]
    if call.kind.endswith("all-gather"):
        out = torch.empty(W, len(inputs[0]), dtype=call.dtype)
        if call.kind == "all-gather":
            work = all_gather(out.view(-1), inputs[0], group=group, async_op=True)
        else:
            work = dist.all_gather(list(out), inputs[0], group=group, async_op=True)
        expected = torch.stack([arrives(r, 0) for r in range(W)]).to(call.dtype)
        return work, inputs, [out], [expected]
    if call.kind.endswith("reduce-scatter"):
        out, whole = torch.empty(len(inputs[0]), dtype=call.dtype), torch.cat(inputs)
        if call.kind == "reduce-scatter":
            work = reduce_scatter(out, whole, group=group, async_op=True)
        else:
            parts = list(whole.view(W, -1))
            work = dist.reduce_scatter(out, parts, group=group, async_op=True)
        expected = added([arrives(r, rank) for r in range(W)]).to(call.dtype)
        return work, [whole], [out], [expected]
    if call.kind == "all-to-all":
        arriving = [row[rank] for row in call.sizes]
        out, whole = torch.empty(sum(arriving), dtype=call.dtype), torch.cat(inputs)
        leaving = [*call.sizes[rank]]
        work = dist.all_to_all_single(out, whole, arriving, leaving, group=group, async_op=True)
        expected = torch.cat([arrives(r, rank).to(call.dtype) for r in range(W)])
        return work, [whole], [out], [expected]
    if call.kind == "swap":
        after, before = (rank + 1) % W, (rank - 1) % W
        out = torch.empty(call.sizes[before][rank], dtype=call.dtype)
        operations = [
            dist.P2POp(dist.isend, inputs[after], group=group, group_peer=after),
            dist.P2POp(dist.irecv, out, group=group, group_peer=before),
        ]
        works = dist.batch_isend_irecv(operations)
        return works, inputs, [out], [arrives(before, rank).to(call.dtype)]
    return dist.barrier(group=group, async_op=True), [], [], []


def _sum(call: Call, everything: Sequence[list[Tensor]], W: int) -> Tensor:
    rows = [torch.cat(row) for row in everything]
    if call.kind == "maximum":
        return torch.stack(rows).amax(0)
    divisor = W if call.kind == "average" else 1
    if not call.is_coded(0, 0):
        return (added(rows) / divisor if divisor > 1 else added(rows)).to(call.dtype)
    total = added([call.coded(row) for row in rows]) / divisor
    return (total if W == 2 else call.coded(total)).to(call.dtype)


def wrong(program: list[Call], rank: int, group: Any) -> str:
    """What a program gets wrong on this rank; empty if nothing."""
    flying: list[tuple[Call, Any, list[Tensor], list[Tensor], list[Tensor]]] = []
    done: list[tuple[Call, list[Tensor], list[Tensor]]] = []
    draw = random.Random(14)  # the same order on all ranks

    def land(at: int) -> None:
        call, work, inputs, outputs, expected = flying.pop(at)
        for one in work if isinstance(work, list) else [work]:
            one.wait()
        for t in inputs:
            t.fill_(77)  # nobody needs them any more
        done.append((call, outputs, expected))

    for call in program:
        with tagc.activations() if call.activation else nullcontext():
            flying.append((call, *start(call, rank, group)))
        while len(flying) > call.then:
            land(draw.randrange(len(flying)))
    while flying:
        land(draw.randrange(len(flying)))
    for call, outputs, expected in done:
        for out, wanted in zip(outputs, expected, strict=True):
            if not torch.allclose(out, wanted, rtol=0, atol=0, equal_nan=True):
                off = (out - wanted).abs().max().item()
                return f"{call}: {off:.3g} off"
    return ""


@on_ranks(2)
@pytest.mark.parametrize(("bits", "block"), [(8, 64), (4, 32), (0, 0)])
@pytest.mark.parametrize("seeds", [range(6), slow(range(6, 150))], ids=str)
def test_random_programs(rank: int, world_size: int, seeds: range, bits: int, block: int) -> None:
    """To the bit: by torch's functions and by its functional collectives, several at once."""
    group = mesh_of(world_size, bits=bits, block=block).get_group()
    for seed in seeds:
        off = wrong(programs(seed, world_size, 14, bits, block), rank, group)
        assert not off, (seed, off)


def one_by_one(group: Any, rank: int) -> Any:
    """``dist.all_to_all``, which gloo does not have. It would end the process if two ranks took a
    message for longer and shorter."""

    def all_to_all(out: list[Tensor], inp: list[Tensor], **options: Any) -> Any:
        works = []
        for r in (r for r in range(len(out)) if r != rank):
            if out[r].numel():
                works.append(group._inner.recv([out[r]], r, 1000 + out[r].numel()))
            if inp[r].numel():
                works.append(group._inner.send([inp[r]], r, 1000 + inp[r].numel()))
        for work in works:
            work.wait()
        out[rank].copy_(inp[rank])

    return patch("tagc.collect.transport.dist.all_to_all", all_to_all)


@on_ranks(3)
def test_random_programs_where_receivers_must_know_lengths(rank: int, world_size: int) -> None:
    """As on NCCL. Codec ``exact`` agrees on the length of messages, also with ranks that have only
    small ones."""
    group = mesh_of(world_size, bits=0).get_group()
    with as_on_nccl(), one_by_one(group, rank):
        for seed in range(8):
            off = wrong(programs(seed, world_size, 14, 0, 0), rank, group)
            assert not off, (seed, off)

"""The Triton operators of sparse packing against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from support import oracle
from support.kernel_cases import Cases, canonical, check_margins, interpreted, kernels, placed, same
from support.sync import synchronizing_raises
from tagc.bitmap import to_bitmap
from tagc.blocks import BlockLayout
from tagc.ops import reference
from tagc.packed import HEADER, KEPT_GROUPS, POISON, PackedLayout, plan_packed

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32
LOW_BITS = (0, 1, 2, 4, 8, 16)


@dataclass
class Problem:
    """Arguments of pack, on the CPU."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    support: Tensor | None
    layout: PackedLayout


# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.2),
    "overflow": (0.5, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "all above": (1.0, 0.5),
    "room for all": (0.2, 1.0),
}


def problem(
    n: int,
    mode: str,
    *,
    bits: int = 8,
    group: int = 1,
    block: int = 32,
    low: int | None = None,
    grad: torch.dtype = F32,
    residual: torch.dtype | None = F32,
    R: int = 2,
    seed: int = 0,
    given: bool = False,
) -> Problem:
    """``low`` are the low bits, None for the planned ones; ``given`` makes a support."""
    rng = np.random.default_rng([n, group, seed])
    above, keep = MODES[mode]
    groups = -(-n // group)
    capacity = int(keep * groups)
    layout = plan_packed(n, capacity=capacity, group=group, bits=bits, block=block)
    if low is not None:
        layout = replace(layout, low_bits=low)
    g = oracle.values((R, n), rng).to(grad)
    r = None if residual is None else oracle.values((R, n), rng).to(residual)
    x = g.float() if r is None else g.float() + r.float()
    whole = torch.nn.functional.pad(x, (0, groups * group - n)).unflatten(1, (groups, -1))
    size = whole.abs().amax(-1).sort(1, descending=True).values
    threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-20)
    if mode == "empty":
        threshold = torch.full((R,), 2.0**20)
    support = None
    if given:
        present = torch.zeros(R, groups, dtype=torch.bool)
        for row in present:
            some = int(rng.integers(0, capacity + 1)) if mode == "usual" else capacity
            row[rng.choice(groups, some if mode != "empty" else 0, replace=False)] = True
        support = to_bitmap(present)
    return Problem(g, r, threshold, support, layout)


def packed(ops, p: Problem, device: str, aligned: bool = False) -> dict[str, Tensor | None]:
    R = p.grad.shape[0]
    out = {
        "message": oracle.poisoned(R, p.layout.words, dtype=I32),
        "counts": oracle.poisoned(R, 4, dtype=I32),
        "residual": p.residual,
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    grad, support = placed(p.grad, device, aligned), placed(p.support, device, aligned)
    threshold = p.threshold.to(device)
    ops.pack(
        grad, out["residual"], threshold, support, out["message"], out["counts"], layout=p.layout
    )
    same("gradient", grad, p.grad)
    same("support", support, p.support)
    for tensor in out.values():
        check_margins(tensor)
    return out


def check_sum(
    message: Tensor,
    support: Tensor | None,
    layout: PackedLayout,
    device: str,
    *,
    dtype=F32,
    divisor=3,
    aligned=False,
) -> Tensor:
    """unpack against the reference."""
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        result = placed(oracle.poisoned(layout.numel, dtype=dtype), where, aligned)
        sent = placed(message, where, aligned)
        ops.unpack(sent, placed(support, where, aligned), result, layout=layout, divisor=divisor)
        same("message", sent, message)
        check_margins(result)
        out.append(result)
    same("out", canonical(out[1]), canonical(out[0]))
    return out[0]


def check(p: Problem, device: str, *, dtype=F32, divisor=3, aligned=False) -> dict[str, Tensor]:
    """Pack, then add up all rows, against the reference; what that gives."""
    want = packed(reference, p, "cpu", aligned)
    got = packed(kernels("ops"), p, device, aligned)
    for name, tensor in want.items():
        same(name, got[name], tensor)
    message = want["message"]
    assert message is not None
    # Rows have supports of their own here; what a rank receives has one for all.
    support = None if p.support is None else p.support[0]
    out = check_sum(
        message, support, p.layout, device, dtype=dtype, divisor=divisor, aligned=aligned
    )
    results = {**want, "out": out}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def check_index(present: Tensor, layout: PackedLayout, device: str) -> None:
    """write_index and read_index against the reference, bits past the last group set."""
    bitmap = to_bitmap(present)
    if present.shape[1] % 32 and layout.low_bits:
        bitmap[:, -1] |= torch.tensor(-1 << present.shape[1] % 32, dtype=I32)
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        index = placed(oracle.poisoned(len(bitmap), layout.index_words, dtype=I32), where, False)
        back = placed(oracle.poisoned(*bitmap.shape, dtype=I32), where, False)
        given = placed(bitmap, where, False)
        ops.write_index(given, index, layout=layout)
        ops.read_index(index, back, layout=layout)
        same("bitmap", given, bitmap)
        for tensor in (index, back):
            check_margins(tensor)
        same("bitmap read", back, to_bitmap(present))
        out.append(index)
    same("index", out[1], out[0])


def check_select(x: Tensor, threshold: Tensor, layout: PackedLayout, device: str) -> Tensor:
    """select against the reference; its bitmaps."""
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        bitmap = placed(oracle.poisoned(len(x), layout.bitmap_words, dtype=I32), where, False)
        counts = placed(oracle.poisoned(len(x), 4, dtype=I32), where, False)
        ops.select(placed(x, where, False), threshold.to(where), bitmap, counts, layout=layout)
        for tensor in (bitmap, counts):
            check_margins(tensor)
        out.append((bitmap, counts))
    for name, want, got in zip(("bitmap", "counts"), *out, strict=True):
        same(name, got, want)
    return out[0][0]


CASES = case = Cases()

# n, mode, bits, group, block, low bits, gradient, residual, output, divisor
GRID = [
    (700, "usual", 8, 1, 256, None, F32, F32, F32, 3),
    (511, "overflow", 4, 1, 32, 0, BF16, F32, BF16, 2),
    (1031, "overflow", 8, 2, 64, 1, BF16, BF16, F32, 1),
    (1027, "usual", 2, 4, 128, 2, F16, None, F16, 2),
    (2050, "overflow", 16, 4, 32, 4, F32, BF16, BF16, 5),
    (2047, "all above", 4, 8, 512, 2, F16, F32, F32, 7),
    (1500, "room for all", 8, 16, 256, 1, BF16, BF16, BF16, 3),
    (3001, "overflow", 2, 32, 32, 1, F32, F32, F32, 2),
    (900, "overflow", 8, 1, 1024, 8, BF16, None, F32, 3),
    (640, "usual", 16, 1, 64, 16, F32, BF16, F32, 1),
    (300, "room for all", 4, 1, 64, 0, F16, BF16, F32, 6),
    (333, "all above", 2, 2, 4096, 4, F32, None, BF16, 3),
]
for row in GRID:
    label = " ".join(str(v).removeprefix("torch.") for v in row)
    for given in (False, True):

        @case(label + ", with a support" * given)
        def _(device, row=row, given=given):
            n, mode, bits, group, block, low, grad, residual, dtype, divisor = row
            p = problem(
                n, mode, bits=bits, group=group, block=block, low=low, grad=grad,
                residual=residual, given=given,
            )  # fmt: skip
            if given:
                p.threshold.fill_(float("nan"))  # not read
            counts = check(p, device, dtype=dtype, divisor=divisor)["counts"]
            if mode == "overflow":
                assert (counts[:, 2] == p.layout.capacity).all()
                assert given or (counts[:, 0] > p.layout.capacity).all()


for mode in MODES:

    @case(f"tiny sizes, {mode}")
    def _(device, mode=mode):
        for i, n in enumerate((1, 3, 31, 33, 65)):
            check(problem(n, mode, group=(1, 2, 4, 32)[i % 4], residual=BF16, R=1), device)
            check(problem(n, mode, low=(1, 2, 4)[i % 3], R=1), device)
            check(problem(n, mode, group=(4, 1)[i % 2], given=True, R=1), device)


@case("nothing at all")
def _(device):
    for low in (0, 2):
        layout = replace(plan_packed(0, capacity=0), low_bits=low)
        for support in (None, torch.zeros(2, 0, dtype=I32)):
            p = Problem(torch.zeros(2, 0), torch.zeros(2, 0), torch.ones(2), support, layout)
            assert check(p, device)["message"][:, :HEADER].tolist() == [[0, 0]] * 2


@case("aligned rows")
def _(device):
    for group, grad, residual in ((1, F32, F32), (4, BF16, BF16), (8, F32, BF16)):
        for given in (False, True):
            p = problem(1024, "overflow", group=group, grad=grad, residual=residual, given=given)
            check(p, device, aligned=True, divisor=4)


@case("non-finite groups are not kept, and poison the message")
def _(device):
    for residual, low in ((F32, 2), (BF16, 0), (None, 1)):
        p = problem(600, "usual", group=2, low=low, residual=residual, R=3)
        p.grad[0, 3], p.grad[0, 400], p.grad[0, 599] = float("nan"), float("inf"), -float("inf")
        done = check(p, device)
        assert done["message"][:, POISON].tolist() == [1, 0, 0]
        assert done["out"].isnan().all()
        if p.residual is not None:
            bad = torch.tensor([2, 3, 400, 401, 598, 599])
            assert torch.equal(done["residual"][0, bad], p.residual[0, bad])


@case("non-finite groups of a support send zeros, and poison the message")
def _(device):
    for residual, mode in ((F32, "room for all"), (BF16, "all above"), (None, "usual")):
        p = problem(600, mode, group=2, residual=residual, R=2, given=True)
        p.grad[0, 3], p.grad[0, 400], p.grad[0, 599] = float("nan"), float("inf"), -float("inf")
        done = check(p, device, dtype=BF16)
        assert done["message"][:, POISON].tolist() == [1, 0]
        assert done["out"].isnan().all()
        if mode == "room for all":
            assert done["counts"][:, 0].tolist() == [300, 300]
        if p.residual is not None:
            bad = torch.tensor([2, 3, 400, 401, 598, 599])
            assert torch.equal(done["residual"][0, bad], p.residual[0, bad])


@case("ties stay in the order of the index")
def _(device):
    for n, group, capacity in ((700, 1, 137), (700, 4, 1), (2080, 32, 3)):
        p = problem(n, "usual", group=group, residual=BF16, R=1)
        assert p.residual is not None
        p.grad.fill_(2.0)
        p.residual.zero_()
        p.grad[0, n // 2] = -3.0
        p.threshold.fill_(1.0)
        p.layout = plan_packed(n, capacity=capacity, group=group)
        done = check(p, device)
        assert done["counts"][0].tolist() == [n // group, n // group, capacity, 0]
        kept = oracle.bits_of(
            check_select(p.grad, p.threshold, p.layout, device)[0].numpy(), n // group
        )
        assert kept == sorted([*range(capacity - 1), n // 2 // group])


@case("a program that trims several tiles")
def _(device):
    with mock.patch.object(kernels("trim"), "_PROGRAMS", 2):
        p = problem(5000, "overflow", group=8, low=2, grad=BF16, residual=BF16, R=1)
        p.grad.clamp_(-1, 1)
        assert p.residual is not None
        p.residual.zero_()
        p.threshold.fill_(0.5)
        assert check(p, device)["counts"][0, 0] > p.layout.capacity


@case("a residual stays finite")
def _(device):
    for residual, given in ((BF16, False), (F32, False), (BF16, True)):
        p = problem(300, "all above", residual=residual, R=1, given=given)
        p.grad[0, ::2], p.grad[0, 1::6] = 3.4e38, -3.4e38
        p.residual = torch.zeros_like(p.grad).to(residual)
        done = check(p, device)
        assert done["residual"].isfinite().all()
        assert done["residual"].abs().max() > 3.3e38


@case("numbers next to zero, zeros of both signs")
def _(device):
    for grad, residual in ((F32, F32), (BF16, BF16), (F16, F32), (F32, BF16), (F32, None)):
        for given in (False, True):
            p = problem(160, "all above", grad=grad, residual=residual, R=1, given=given)
            tiny = 2.0**-24 if grad == F16 else 2.0**-133
            p.grad[0] = (torch.arange(160) - 80) * tiny
            p.grad[0, ::7] = -0.0
            if p.residual is not None:
                p.residual[0] = (torch.arange(160) % 7) * 2.0**-133
                p.residual[0, ::7] = -0.0
            p.threshold.fill_(2.0**-131)
            check(p, device)


@case("bits past the last group mean nothing")
def _(device):
    p = problem(610, "all above", group=2, residual=BF16, given=True)
    assert p.support is not None
    tail = torch.tensor(-1 << 305 % 32, dtype=I32)
    p.support[:, -1] |= tail
    check(p, device)
    p = problem(610, "usual", group=2, low=0)
    message = packed(reference, p, "cpu")["message"]
    assert message is not None
    message[:, HEADER + p.layout.index_words - 1] |= tail
    check_sum(message, None, p.layout, device)


@case("indexes")
def _(device):
    rng = np.random.default_rng(0)
    for groups, share in ((1, 1.0), (33, 0.5), (64, 0.0), (1000, 1.0), (1999, 0.1)):
        present = torch.from_numpy(rng.random((2, groups)) < share)
        for low in LOW_BITS:
            spare = 0 if groups % 2 else 3
            capacity = min(groups, int(present.sum(1).max()) + spare)
            layout = PackedLayout(
                numel=groups, group=1, capacity=capacity, low_bits=low,
                values=BlockLayout(numel=capacity, bits=8),
            )  # fmt: skip
            check_index(present, layout, device)


@case("indexes of several blocks of words")
def _(device):
    rng = np.random.default_rng(0)
    present = torch.zeros(1, 70001, dtype=torch.bool)
    for first, last, keys in ((0, 1000, 300), (20000, 69000, 100), (69990, 70001, 11)):
        present[0, first + rng.choice(last - first, keys, replace=False)] = True
    # As many chunks of blocks as a million words have.
    with mock.patch.object(kernels("rank"), "_CHUNK", 2):
        for low in (1, 8):
            layout = replace(plan_packed(70001, capacity=500), low_bits=low)
            check_index(present, layout, device)


@case("messages of several blocks of words")
def _(device):
    p = problem(40000, "empty", bits=4, R=1, grad=BF16)
    p.layout = replace(plan_packed(40000, capacity=200, bits=4, block=64), low_bits=4)
    p.grad.clamp_(-1, 1)
    assert p.residual is not None
    p.residual.zero_()
    p.grad[0, -90::3] = 2.0
    p.grad[0, :5000:100] = -3.0
    p.threshold.fill_(1.5)
    with mock.patch.object(kernels("rank"), "_CHUNK", 1):
        assert check(p, device)["counts"][0, 2] == 80


@case("select")
def _(device):
    for n, mode, group, dtype in (
        (700, "usual", 1, F32), (2051, "overflow", 4, BF16), (99, "nothing fits", 2, F32),
        (1300, "overflow", 16, F32), (300, "room for all", 8, BF16), (65, "empty", 1, F32),
    ):  # fmt: skip
        p = problem(n, mode, group=group, grad=dtype, residual=None, R=3)
        p.grad[1, n // 2] = float("inf")
        check_select(p.grad, p.threshold, p.layout, device)


@case("additions in the order of the messages")
def _(device):
    for dtype, divisor in ((F32, 1), (BF16, 3)):
        p = problem(300, "room for all", bits=16, R=6, residual=None)
        p.grad *= torch.tensor([1, 1e3, 1e-3, 1, 1e2, 1e-2])[:, None]
        message = packed(reference, p, "cpu")["message"]
        assert message is not None
        forth = check_sum(message, None, p.layout, device, dtype=dtype, divisor=divisor)
        back = check_sum(message.flip(0), None, p.layout, device, dtype=dtype, divisor=divisor)
        assert dtype != F32 or not torch.equal(forth, back)


@case("any rank's poison word")
def _(device):
    p = problem(130, "usual", R=3)
    message = packed(reference, p, "cpu")["message"]
    assert message is not None
    for r in range(3):
        sent = message.contiguous()
        sent[:, POISON] = torch.arange(3) == r
        assert check_sum(sent, None, p.layout, device).isnan().all()
    support = torch.zeros(p.layout.bitmap_words, dtype=I32)
    assert check_sum(sent, support, p.layout, device).isnan().all()


@case("damaged messages and overfull bitmaps stay within bounds")
def _(device):
    ops, rng = kernels("ops"), np.random.default_rng(0)
    for low in (0, 1, 4):
        layout = replace(plan_packed(500, capacity=40, block=32), low_bits=low)
        words = rng.integers(-(2**31), 2**31, (2, layout.words), dtype=np.int32)
        words[:, POISON] = 0
        out = placed(oracle.poisoned(500, dtype=F32), device, False)
        bitmap = placed(oracle.poisoned(2, layout.bitmap_words, dtype=I32), device, False)
        message = placed(torch.from_numpy(words), device, False)
        assert message is not None
        ops.read_index(
            message[:, HEADER : HEADER + layout.index_words], bitmap, layout=layout
        )  # groups beyond the last
        ops.unpack(message, None, out, layout=layout, divisor=1)
        for tensor in (message, bitmap, out):
            check_margins(tensor)
        # More groups than fit: those past the capacity have no values and no place in the list.
        every = torch.full((2, layout.bitmap_words), -1, dtype=I32, device=device)
        total = torch.empty(500, device=device)
        ops.unpack(message, every[0], total, layout=layout, divisor=1)
        assert not total[40:].any()
        guard = torch.full((2 * 40 + 600,), oracle.SENTINEL, dtype=I32, device=device)
        keys = guard[:80].view(2, 40)
        with mock.patch.object(kernels("listing"), "buffer", return_value=keys):
            index = placed(oracle.poisoned(2, layout.index_words, dtype=I32), device, False)
            if low:
                ops.write_index(every, index, layout=layout)
                check_margins(index)
                assert keys.tolist() == [[*range(40)]] * 2
        assert (guard[80:] == oracle.SENTINEL).all()


@case("the same launches give the same bits")
def _(device):
    p = problem(1999, "overflow", group=2, low=2, residual=BF16)
    first, second = (packed(kernels("ops"), p, device) for _ in range(2))
    for name, tensor in first.items():
        assert tensor is not None
        same(name, second[name], tensor.cpu())


# --- in a process of its own ------------------------------------------------------------------


@pytest.fixture(scope="session")
def outcome(tmp_path_factory) -> dict[str, str | None]:
    return interpreted(__file__, tmp_path_factory.mktemp("packed"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(outcome, name):
    failure = outcome[name]
    assert failure is None, failure


# --- natively ---------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    CASES[name]("cuda")


def gpu_step(p: Problem):
    """Device arguments of a pack and an unpack, and a function that runs both."""
    ops, layout = kernels("ops"), p.layout
    assert p.residual is not None
    R = p.grad.shape[0]
    t = {
        "grad": p.grad.cuda(), "residual": p.residual.cuda(), "threshold": p.threshold.cuda(),
        "message": oracle.poisoned(R, layout.words, dtype=I32).cuda(),
        "counts": oracle.poisoned(R, 4, dtype=I32).cuda(),
        "marks": oracle.poisoned(R, layout.bitmap_words, dtype=I32).cuda(),
        "marks counts": oracle.poisoned(R, 4, dtype=I32).cuda(),
        "index": oracle.poisoned(R, layout.index_words, dtype=I32).cuda(),
        "out": oracle.poisoned(layout.numel, dtype=F32).cuda(),
    }  # fmt: skip
    if p.support is not None:
        t["support"] = p.support.cuda()

    def run() -> None:
        ops.select(t["grad"], t["threshold"], t["marks"], t["marks counts"], layout=layout)
        ops.write_index(t["marks"], t["index"], layout=layout)
        ops.read_index(t["index"], t["marks"], layout=layout)
        ops.pack(
            t["grad"], t["residual"], t["threshold"], t.get("support"), t["message"],
            t["counts"], layout=layout,
        )  # fmt: skip
        support = None if p.support is None else t["support"][0]
        ops.unpack(t["message"], support, t["out"], layout=layout, divisor=3)

    return t, run


@gpu
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("low", [0, 2])
def test_nothing_waits_for_the_device(low, given):
    _, run = gpu_step(problem(5003, "overflow", group=4, low=low, given=given))
    run()
    with synchronizing_raises():
        run()


@gpu
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("low", [0, 2])
def test_a_cuda_graph_holds_a_step(low, given):
    shape = {"group": 4, "low": low, "grad": BF16, "residual": BF16, "given": given}
    t, run = gpu_step(problem(5003, "overflow", **shape))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (5, 6):
        other = problem(5003, "overflow", seed=seed, **shape)
        for name in ("grad", "residual", "threshold", "support")[: 4 if given else 3]:
            t[name].copy_(getattr(other, name))
        if given:
            # The index, which a support leaves alone.
            t["message"].copy_(oracle.poisoned(*t["message"].shape, dtype=I32))
        graph.replay()
        want = check(other, "cuda")
        for name in ("message", "counts", "residual", "out"):
            same(name, t[name], want[name])
        bitmap = check_select(other.grad, other.threshold, other.layout, "cuda")
        same("marks", t["marks"], bitmap)


@gpu
def test_more_than_two_to_the_31_elements():
    n = (1 << 31) + 1040
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free device memory")
    ops, layout = kernels("ops"), plan_packed(n, capacity=6 * 1024, group=2, bits=4)
    where = torch.tensor([0, 5, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, n - 1], device="cuda")
    grad = torch.zeros(1, n, dtype=BF16, device="cuda")
    grad[:, where] = 7.0
    residual = torch.zeros_like(grad)
    message = torch.empty(1, layout.words, dtype=I32, device="cuda")
    counts = torch.empty(1, 4, dtype=I32, device="cuda")
    one = torch.ones(1, device="cuda")
    ops.pack(grad, residual, one, None, message, counts, layout=layout)
    assert counts.tolist() == [[6, 6, 6, 0]]
    assert message[0, KEPT_GROUPS] == 6
    assert not residual.any()
    out = torch.full((n,), float("nan"), dtype=BF16, device="cuda")
    ops.unpack(message, None, out, layout=layout, divisor=1)
    assert torch.equal(out, grad[0])
    kernels("scratch").release()


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))

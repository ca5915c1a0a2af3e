"""Exact changes and packed exponents: any rows, no bit lost, never longer than the row, and short
where they can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support import oracle
from support.marks import named
from tagc.ops import cpu, reference
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import ExponentLayout

BF16, F16, I16, I32 = torch.bfloat16, torch.float16, torch.int16, torch.int32
# One element, none, and blocks that are full, short, or of one element.
ROWS = (
    ((1,), BF16, 1024),
    ((0,), F16, 1024),
    ((33, 0, 1, 512, 64), BF16, 256),
    ((601, 5), F16, 32),
    ((4100, 0, 1, 513), BF16, 2048),
)
operators = pytest.mark.parametrize("ops", [reference, cpu], ids=named)
Rows = tuple[Tensor, Tensor]


def normal(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(1, n, generator=generator)).to(dtype)


def bits(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (1, n), generator=generator).to(I16).view(dtype)


def moved(x: Tensor, by: float, seed: int = 7) -> Tensor:
    return (x.float() + by * normal(x.shape[1], torch.float32, seed)).to(x.dtype)


def stepped(x: Tensor, which: slice, by: int = 1) -> Tensor:
    """Some elements with the next bit patterns."""
    out = x.clone()
    out.view(I16)[:, which] += by
    return out


def with_value(x: Tensor, value: float, which: slice) -> Tensor:
    out = x.clone()
    out[:, which] = value
    return out


def adversarial(n: int, dtype: torch.dtype) -> dict[str, Rows]:
    """Old and new rows."""
    w, zeros, any_ = normal(n, dtype), torch.zeros(1, n, dtype=dtype), bits(n, dtype, 1)
    least = torch.finfo(dtype).smallest_normal
    subnormal = (least * torch.linspace(-2, 2, n)[None]).to(dtype)
    middle = slice(n // 2, n // 2 + 1)
    found = {
        "random bits": (any_, bits(n, dtype, 2)),
        "random bits, few change": (any_, stepped(any_, slice(3, None, 97))),
        "everything new": (zeros, w),
        "back to zero": (w, zeros),
        "one huge outlier": (w, with_value(w, torch.finfo(dtype).max, middle)),
        "every other minus zero": (zeros, with_value(zeros, -0.0, slice(0, None, 2))),
        "subnormal": (subnormal, stepped(subnormal, slice(0, None, 5))),
        "through zero": (subnormal, -subnormal),
        "larger and larger": (w, (w.float() * torch.logspace(-4, 4, n)).to(dtype)),
        "all the same": (w, w.clone()),
        "the first": (w, stepped(w, slice(0, 1))),
        "the last": (w, stepped(w, slice(n - 1, n))),
        "all by one": (w, stepped(w, slice(None))),
    }
    for name, value in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
        some = with_value(w, value, slice(0, None, 11))
        found |= {f"to {name}": (w, some), f"from {name}": (some, moved(w, 1e-2))}
    for by in (3.0, 0.1, 1e-2, 1e-3, 1e-4):
        found[f"moved by {by}"] = (w, moved(w, by))
    quiet = any_.clone()
    quiet.view(I16)[:, ::3] |= 0x7F81 if dtype == BF16 else 0x7C01  # NaNs with payloads
    return found | {"NaNs with payloads": (any_, quiet), "from NaNs with payloads": (quiet, any_)}


def sent(ops: Any, old: Tensor, new: Tensor, layout: ExactLayout, spare: int = 3) -> Rows:
    """The plan, and the message in a buffer that is longer."""
    plan = oracle.poisoned(1, layout.plan_words, dtype=I32)
    ops.measure_exact(new, old, plan, layout=layout)
    message = oracle.poisoned(1, layout.words + spare, dtype=I32)
    ops.encode_exact(new, old, plan, message, layout=layout)
    return plan, message


def same_patterns(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(I16), b.view(I16))


@pytest.mark.parametrize(("spans", "dtype", "block"), ROWS, ids=str)
def test_any_row_arrives_to_the_bit_and_is_never_longer(spans, dtype, block):
    """The CPU sends the reference's plans and messages; both read them."""
    layout = ExactLayout(spans=spans, dtype=dtype, block=block)
    for name, (old, new) in adversarial(layout.numel, dtype).items():
        before = old.clone(), new.clone()
        plan, message = sent(reference, old, new, layout)
        for want, got in zip((plan, message), sent(cpu, old, new, layout), strict=True):
            assert torch.equal(want, got), name
        total = int(plan[0, 0])
        assert total == int(message[0, 0]) <= layout.raw_words + 1, name
        assert bool((message[0, total:] == oracle.SENTINEL).all()), name
        assert same_patterns(old, before[0]), name
        assert same_patterns(new, before[1]), name
        for ops in (reference, cpu):
            # Several messages, each as long as it has to be.
            rows = torch.cat([old, old])
            ops.decode_exact(message[:, :total].expand(2, total), rows, layout=layout)
            for row in rows:
                assert same_patterns(row, new[0]), name
        assert (total == 1) == same_patterns(old, new), name
        assert name != "random bits" or layout.numel < 9 or total == layout.raw_words + 1


@operators
def test_the_example_of_the_format(ops):
    layout = ExactLayout(spans=(64,), dtype=BF16)
    old = torch.ones(1, 64, dtype=BF16)
    new = old.clone()
    new[0, 5], new[0, 40] = 1 + 2.0**-7, 1 - 2.0**-8
    plan, message = sent(ops, old, new, layout)
    assert plan.tolist() == [[5, *[0] * 31, 0x20, 4]]
    block = 2 | 0b101 << 7 | 5 << 10 | 8 << 15 | 2 << 20 | 1 << 22
    assert message[0, :5].tolist() == [5, -(2**31), 0x20, 1, block]


@pytest.mark.parametrize(
    ("dtype", "rate", "most"), [(BF16, 3e-3, 7.05), (BF16, 1e-6, 0.2), (F16, 1e-5, 2.12)]
)
def test_small_changes_take_few_bits(dtype, rate, most):
    """Updates of one size for weights of all sizes, in bits an element."""
    n = 50_000
    masters = torch.cat([scale * normal(n, torch.float32, i) for i, scale in enumerate((1, 10))], 1)
    new = (masters + rate * 50 * normal(2 * n, torch.float32, 9)).to(dtype)
    plan, _ = sent(cpu, masters.to(dtype), new, ExactLayout(spans=(n, n), dtype=dtype))
    assert 32 * int(plan[0, 0]) / (2 * n) <= most


def flipped(message: Tensor, generator: torch.Generator) -> Tensor:
    """Some bits after the total are wrong."""
    out = message.clone()
    places = torch.randint(1, out.shape[1], (20,), generator=generator)
    out[0, places] ^= 1 << torch.randint(0, 31, (20,), generator=generator).to(I32)
    return out


def garbage(message: Tensor, generator: torch.Generator) -> Tensor:
    out = torch.randint(-(2**31), 2**31, message.shape, generator=generator).to(I32)
    out[0, 0] = message[0, 0]
    return out


def without_length(message: Tensor, generator: torch.Generator) -> Tensor:
    out = message.clone()
    out[0, 0] = int(torch.randint(-1, 2, (), generator=generator))
    return out


def cut(message: Tensor, generator: torch.Generator) -> Tensor:
    return message[:, : int(torch.randint(1, message.shape[1], (), generator=generator))]


@operators
@pytest.mark.parametrize("damage", [flipped, garbage, cut, without_length], ids=named)
def test_a_damaged_message_writes_only_to_its_row(
    ops, damage: Callable[[Tensor, torch.Generator], Tensor]
):
    layout = ExactLayout(spans=(777, 64, 1500), dtype=BF16, block=256)
    generator = torch.Generator().manual_seed(3)
    old = normal(layout.numel, BF16)
    for i, by in enumerate((1e-1, 1e-2, 1e-3, 1e-4)):
        plan, message = sent(ops, old, moved(old, by, i), layout)
        wide = torch.full((3, layout.numel + 64), 7.0, dtype=BF16)
        rows = wide[1:2, 32:-32]
        rows.copy_(old)
        ops.decode_exact(damage(message[:, : int(plan[0, 0])], generator), rows, layout=layout)
        beside = torch.cat([wide[0], wide[2], wide[1, :32], wide[1, -32:]])
        assert bool((beside == 7).all())


def test_layout_of_changes():
    layout = ExactLayout(spans=(1000, 0, 33), dtype=BF16, block=512)
    assert (layout.numel, layout.blocks, layout.raw_words, layout.words) == (1033, 3, 517, 518)
    assert layout.plan_words == 1 + 3 * 32 + 3


# Packed exponents


def packed(ops: Any, rows: Tensor) -> Tensor:
    layout = ExponentLayout(numel=rows.shape[1])
    message = oracle.poisoned(len(rows), layout.raw_words, dtype=I32)
    ops.pack_exponents(rows, message, layout=layout)
    return message


@pytest.mark.parametrize("n", [0, 1, 65, 4096, 9000])  # short and full blocks and chunks
def test_any_exponents_arrive_in_two_lengths(n):
    """The CPU sends the reference's messages; both read them, cut and whole."""
    layout, lengths = ExponentLayout(numel=n), set()
    found = {name: new for name, (_, new) in adversarial(n, BF16).items()}
    found["all exponents"] = (torch.arange(n) % 256 << 7)[None].to(I16).view(BF16)
    for value in (math.nan, -math.inf, -0.0, 1e38, 1e-40):
        for every in (1, 3, 70):
            rows = with_value(normal(n, BF16), value, slice(1, None, every))
            found[f"{value} in every {every}"] = rows
    for name, rows in found.items():
        message = packed(reference, rows)
        assert torch.equal(message, packed(cpu, rows)), name
        is_raw = int(message[0, 0]) == 1
        used = layout.raw_words if is_raw else layout.words
        assert bool((message[0, used:] == oracle.SENTINEL).all()), name
        for ops, words in ((reference, used), (cpu, used), (cpu, None)):
            got = oracle.poisoned(1, n, dtype=BF16)
            ops.unpack_exponents(message[:, :words], got, layout=layout)
            assert same_patterns(got, rows), name
        lengths.add(is_raw)
    assert lengths == ({False, True} if n > 1 else {False})


@operators
def test_the_example_of_packed_exponents(ops):
    message = packed(ops, torch.tensor([[1, -0.75, 0, 1e-6]], dtype=BF16))
    want = [0] * 16 + [0, 0xC0, 0, 6] + [0] * 60
    want += [0xE0, 0xE1, 0xEE, 0xEF] + 28 * [0xEE] + [0x7F, 107] + [0] * 14
    assert message[0, : ExponentLayout(numel=4).words].view(torch.uint8).tolist() == want


@operators
def test_a_chunk_has_as_many_exceptions_as_blocks(ops):
    """One more, and the row travels as it is: in the first chunk, and in the last, shorter one."""
    for first, room in ((0, 64), (4096, 10)):
        rows = torch.ones(1, 4096 + 10 * 64, dtype=BF16)
        for count in (room, room + 1):
            rows[0, first : first + 61 * count : 61] = 2.0**-60
            assert int(packed(ops, rows)[0, 0]) == (count > room)


def test_very_large_numbers_are_the_exceptions_of_their_blocks():
    """Not the 63 others: a few activations of a language model are thousands of times larger."""
    rows = normal(4096, BF16)
    rows[0, ::100] *= 2.0**20
    assert int(packed(cpu, rows)[0, 0]) == 0


def test_layout_of_exponents():
    layout = ExponentLayout(numel=2**20)
    assert layout.words == 4 + 2**20 * 98 // 64 // 4
    assert layout.raw_words == 4 + 2**19
    short = ExponentLayout(numel=1)
    assert short.raw_words == short.words == 4 + 28

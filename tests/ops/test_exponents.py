"""Packed exponents: any bits arrive, in two lengths of message."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support import oracle
from support.marks import named
from tagc.ops.cpu import exponents as cpu
from tagc.ops.exponents import ExponentLayout
from tagc.ops.reference import exponents as reference

BF16, I16, I32 = torch.bfloat16, torch.int16, torch.int32
operators = pytest.mark.parametrize("ops", [reference, cpu], ids=named)
# None, one, short and full blocks, short and full chunks.
SIZES = (0, 1, 65, 4096, 9000)


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(1, n, generator=torch.Generator().manual_seed(seed)).to(BF16)


def bits(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**15), 2**15, (1, n), generator=generator).to(I16).view(BF16)


def with_some(x: Tensor, every: int, value: float) -> Tensor:
    out = x.clone()
    out[:, 1::every] = value
    return out


def adversarial(n: int) -> dict[str, Tensor]:
    x = normal(n)
    payloads = bits(n)
    payloads.view(I16)[:, ::3] |= 0x7F81
    found = {
        "normal": x,
        "random bits": bits(n),
        "zeros": torch.zeros(1, n, dtype=BF16),
        "minus zeros": -torch.zeros(1, n, dtype=BF16),
        "subnormal": (2.0**-126 * torch.linspace(-2, 2, n)[None]).to(BF16),
        "NaNs with payloads": payloads,
        "all exponents": (torch.arange(n) % 256 << 7)[None].to(I16).view(BF16),
        "ascending": torch.logspace(-30, 30, n)[None].to(BF16),
    }
    for value in (math.nan, -math.inf, -0.0, 1e38, 1e-40):
        for every in (1, 3, 70):
            found[f"{value} in every {every}"] = with_some(x, every, value)
    return found


def sent(ops, rows: Tensor, layout: ExponentLayout) -> Tensor:
    message = oracle.poisoned(len(rows), layout.raw_words, dtype=I32)
    ops.pack_exponents(rows, message, layout=layout)
    return message


def received(ops, message: Tensor, layout: ExponentLayout) -> Tensor:
    rows = oracle.poisoned(len(message), layout.numel, dtype=BF16)
    ops.unpack_exponents(message, rows, layout=layout)
    return rows


def same_patterns(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(I16), b.view(I16))


@pytest.mark.parametrize("n", SIZES)
def test_any_row_arrives_to_the_bit(n):
    """The CPU sends the reference's messages; both read them, cut and whole."""
    layout = ExponentLayout(numel=n)
    lengths = set()
    for name, rows in adversarial(n).items():
        message, other = (sent(ops, rows, layout) for ops in (reference, cpu))
        assert torch.equal(message, other), name
        is_raw = int(message[0, 0]) == 1
        used = layout.raw_words if is_raw else layout.words
        assert bool((message[0, used:] == oracle.SENTINEL).all()), name
        for ops, words in ((reference, used), (cpu, used), (cpu, None)):
            assert same_patterns(received(ops, message[:, :words], layout), rows), name
        lengths.add(is_raw)
    assert lengths == ({False, True} if n > 1 else {False})


@operators
def test_the_example_of_the_format(ops):
    layout = ExponentLayout(numel=4)
    message = sent(ops, torch.tensor([[1, -0.75, 0, 1e-6]], dtype=BF16), layout)
    want = [0] * 16 + [0, 0xC0, 0, 6] + [0] * 60
    want += [0xE0, 0xE1, 0xEE, 0xEF] + 28 * [0xEE] + [0x7F, 107] + [0] * 14
    assert message[0, : layout.words].view(torch.uint8).tolist() == want


@operators
def test_a_chunk_has_as_many_exceptions_as_blocks(ops):
    """One more, and the row travels as it is: in the first chunk, and in the last, shorter one."""
    layout = ExponentLayout(numel=4096 + 10 * 64)
    for first, room in ((0, 64), (4096, 10)):
        rows = torch.ones(1, layout.numel, dtype=BF16)
        for count in (room, room + 1):
            rows[0, first : first + 61 * count : 61] = 2.0**-60
            message = sent(ops, rows, layout)
            assert int(message[0, 0]) == (count > room)


def test_very_large_numbers_are_the_exceptions_of_their_blocks():
    """Not the 63 others: a few activations of a language model are thousands of times larger."""
    rows = normal(4096)
    rows[0, ::100] *= 2.0**20
    assert int(sent(cpu, rows, ExponentLayout(numel=4096))[0, 0]) == 0


def test_layout():
    layout = ExponentLayout(numel=2**20)
    assert layout.words == 4 + 2**20 * 98 // 64 // 4
    assert layout.raw_words == 4 + 2**19
    short = ExponentLayout(numel=1)
    assert short.raw_words == short.words == 4 + 28
    with pytest.raises(ValueError, match="numel must not be negative, got -1"):
        ExponentLayout(numel=-1)

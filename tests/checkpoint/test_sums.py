"""Sums over the bits of a tensor: the same on a CPU and elsewhere, others after any damage."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tagc.checkpoint import sums
from tagc.checkpoint.sums import WIDTH, sums_of

ROW = 4 * WIDTH  # bytes


def bits(count: int, seed: int = 0) -> Tensor:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, ROW - 1, ROW, ROW + 1, 3 * ROW + 7])
def test_a_cpu_has_those_of_a_device(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = bits(count)
    found = sums_of(values)
    assert found.shape == (-(-count // ROW), 2)
    monkeypatch.setattr(sums, "_on_host", sums.on_device)
    monkeypatch.setattr(sums, "_ROWS", 2)
    assert torch.equal(sums_of(values), found)


def test_they_are_as_described() -> None:
    values = bits(ROW + 6)
    weights = sums._weights(values.device).tolist()
    # SplitMix64's first outputs from seed 0, as other implementations list them.
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [w % 2**64 for w in weights[0][:3]] == first
    content = bytes(values.tolist()) + bytes(2)
    words = [
        int.from_bytes(content[i : i + 4], "little", signed=True) for i in range(0, len(content), 4)
    ]
    for row, found in enumerate(sums_of(values).tolist()):
        own = words[row * WIDTH : (row + 1) * WIDTH]
        for some, sum_of_some in zip(weights, found, strict=True):
            expected = sum(w * x for w, x in zip(some, own, strict=False))
            assert (expected - sum_of_some) % 2**64 == 0


def test_damage_is_seen() -> None:
    """Both sums of a row change, whichever bits do."""
    values, draw = bits(2 * ROW), random.Random(3)
    before = sums_of(values)

    def check(changed: Tensor) -> None:
        rows = (changed != values).view(2, -1).any(1)
        assert rows.any()
        assert torch.equal((sums_of(changed) != before), rows[:, None].expand(2, 2))

    for bit in (0, 1, 6, 7):
        for count in (1, 2, 3, 4, 100):  # of words, in their highest byte
            changed = values.clone()
            for word in draw.sample(range(2 * WIDTH), count):
                changed[4 * word + 3] ^= 1 << bit
            check(changed)
    for start in range(0, 2 * ROW, 4096):
        changed = values.clone()
        changed[start : start + 4096] = 0
        check(changed)
        changed = values.view(-1, 4096).clone()
        other = draw.choice([i for i in range(len(changed)) if i != start // 4096])
        changed[[start // 4096, other]] = changed[[other, start // 4096]]
        check(changed.view(-1))
    check(values.roll(1))
    check(values.roll(ROW))

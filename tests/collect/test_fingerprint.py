"""Fingerprints of shards: equal for equal bits, another for what may happen to parameters."""

from __future__ import annotations

import pytest
import torch

from tagc.ops.fingerprint import fingerprint

SIZES = (0, 1, 2, 5, 1023, 1024, 100_003)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", SIZES)
def test_equal_bits_have_one_wherever_they_lie(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel).to(dtype)
    expected = fingerprint(values)
    wide = torch.zeros(numel + 9, dtype=dtype)
    for start in range(5):
        wide[start : start + numel] = values
        assert torch.equal(fingerprint(wide[start : start + numel]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [n for n in SIZES if n > 1])
def test_changes_are_seen(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = fingerprint(values)
    changed = [-values, 2 * values, values * 0.5, values.flip(0), values.roll(1), values.abs()]
    if numel > 2048:
        # Rows of a matrix, or experts, that change places.
        changed += [values.roll(1024), values.roll(2042), values.roll(2048)]
    for place in {0, numel // 2, numel - 1}:
        one = values.clone()
        one[place] = torch.nextafter(one[place].float(), torch.tensor(9.0)).to(dtype) + 1
        changed.append(one)
        for factor in (-1, 2):  # the sign alone, and the lowest bit of an exponent
            one = values.clone()
            one[place] *= factor
            changed.append(one)
    for other in changed:
        if not torch.equal(other, values):
            assert not torch.equal(fingerprint(other), before)

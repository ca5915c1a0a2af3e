"""The tile that decoders write on a CPU: divided and rounded like torch, at any place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tagc.ops.cpu.arrays import numpy_of
from tagc.ops.cpu.kernels import bitmap
from tagc.ops.cpu.kernels.output import TILE, new_tile, write_tile

# Elements: stored as usual, and past the caches.
SIZES = [1, 33, TILE + 5, (1 << 19) + 77]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 8, 1000, 1024])
@pytest.mark.parametrize(("offset", "add"), [(0, False), (1, True), (7, False), (15, True)])
def test_tiles_are_divided_added_and_rounded_like_torch(dtype, divisor, offset, add):
    generator = torch.Generator().manual_seed(7)
    for n in SIZES:
        # All exponents, subnormal quotients among them, and sums that round up to infinity.
        sums = torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator).to(torch.int32)
        sums = sums.view(torch.float32)
        sums = torch.where(sums.isnan(), 0.0, sums)
        whole = torch.full((n + 2 * 16,), torch.nan, dtype=dtype)
        out = whole[offset : offset + n]
        out.normal_(generator=generator)
        expected = sums / torch.full_like(sums, divisor)
        expected = out.float() + expected if add else expected
        tile = new_tile(TILE, numpy_of(out))
        assert tile.shape == (TILE,)
        assert not tile.any()
        assert (tile.ctypes.data // 4 - out.data_ptr() // out.itemsize) % 16 == 0
        for base in range(0, n, TILE):
            piece = sums[base : base + TILE].numpy()
            tile[: piece.size] = piece
            write_tile(tile, piece.size, np.float32(divisor), add, numpy_of(out), np.uint64(base))
            assert not tile[: piece.size].any()
        assert torch.equal(out, expected.to(dtype))
        assert whole[:offset].isnan().all()
        assert whole[offset + n :].isnan().all()


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("words", [1, 2, 3, 200])
def test_groups_of_a_bitmap_are_listed_in_order(density, words):
    present = np.random.default_rng(3).random(32 * words) < density
    packed = np.packbits(present, bitorder="little").view(np.uint32)
    expected = np.flatnonzero(present)
    assert np.array_equal(bitmap.keys_of(packed), expected)

"""What cannot be peeled: on a CPU the owner gets the estimate of the reference, too."""

import pytest
import torch

from tagc.ops import cpu, reference
from tagc.ops.bitmap import to_bitmap
from tagc.ops.sketch import SketchLayout
from tagc.ops.symbols import SYMBOLS


@pytest.mark.parametrize("symbol", ["int8x4", "int16x2", "int32x1"])
def test_estimates_of_a_table_that_is_too_small_are_those_of_the_reference(symbol):
    """Of 400 keys in 4 x 125 cells some are recovered before the others are stuck."""
    kind, count = SYMBOLS[symbol], 400
    numel = 2000 * kind.lanes
    layout = SketchLayout(numel=numel, symbol=kind, keys=count, hashes=4, partition=125)
    draw = torch.Generator().manual_seed(0)
    keys = torch.randperm(layout.groups, generator=draw)[:count]
    symbols = torch.zeros(layout.groups, dtype=torch.int32)
    symbols[keys] = torch.randint(-100, 100, (count,), generator=draw).int()
    present = torch.zeros(layout.groups, dtype=torch.bool)
    present[keys] = True
    index = torch.cat([to_bitmap(present), torch.zeros(1, dtype=torch.int32)])
    seed, step = torch.tensor([7], dtype=torch.int32), torch.tensor([2.0**-6])
    cells = torch.zeros(layout.cells, dtype=torch.int32)
    reference.insert(symbols, index, seed, cells, layout=layout)
    results = []
    for ops in (reference, cpu):
        out, residual = torch.empty(numel), torch.zeros(numel)
        stats = torch.zeros(2, dtype=torch.int32)
        ops.decode(
            index[None], cells.clone(), step, seed, out, residual, stats, layout=layout, divisor=2
        )
        results.append((out, residual, stats))
    (out, residual, stats), (cpu_out, cpu_residual, cpu_stats) = results
    assert 0 < stats[1] < count - 20, "the case wants keys of both kinds"
    assert residual.count_nonzero() > 0
    assert torch.equal(stats, cpu_stats)
    assert torch.equal(out, cpu_out)
    assert torch.equal(residual, cpu_residual)

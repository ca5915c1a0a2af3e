"""The benchmarks run; what they measure is for them to print."""

from __future__ import annotations

import pytest

from benchmarks import kernels


@pytest.mark.parametrize("symbol", ["int8x4", "float32"])
def test_a_small_case_of_the_kernels(symbol):
    (result,) = kernels.run((kernels.Case(symbol=symbol, numel=1 << 14),))
    assert result["keys"] > 0
    assert symbol in kernels.table([result])

"""What wrapping compiles and checks on a GPU, counted and timed without one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

from benchmarks import suites
from benchmarks.ready import ready, table
from tagc.costs.shapes import synthetic

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_a_policy_is_compiled_and_checked():
    one = ready("loco-4bit", synthetic(10_000_000))
    assert set(one["variants"]) == {"quantize", "dequantize"}
    # Rows that begin anywhere, which this model has none of.
    assert one["more_variants"] >= 2
    assert 2 <= one["kinds"] <= one["calls"]
    # Nothing was in the cache.
    assert 0 < one["check_s"] < one["compile_s"]
    line = table([one]).splitlines()[-1]
    assert line.startswith(f"| loco-4bit | {len(one['variants'])} | ")


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(Exception, match="lo-4bit"):
        suites.main(["ready", "lo-4bit"])

"""Thousands of steps: memory stays where it is, nothing is unresolved, density is on target."""

from __future__ import annotations

import pytest

from benchmarks.soak import DENSITY, RANKS, growth, plots, soak, table


def check(records: list, steps: int, ranks: int) -> None:
    assert len(records) == ranks
    for record in records:
        assert record["steps"] == steps
        assert record["unresolved"] == 0
        assert record["density_target"] == pytest.approx(DENSITY)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", [None, 2])
def test_two_thousand_steps(tmp_path, hosts):
    records = soak(2000, hosts)
    print(table(records))
    check(records, 2000, RANKS * (hosts or 1))
    for record in records:
        assert record["density"] == pytest.approx(DENSITY, rel=0.1)
        # A float that leaks in every step is 96 KiB; what grows is in the first hundred steps.
        assert growth(record, "traced") < 64 * 2**10
        assert growth(record, "resident") < 4 * 2**20
    assert all(file.stat().st_size < 200_000 for file in plots(records, tmp_path))

"""The parity matrix as tests; what a case is, and when it passes, is in `parity/__init__.py`."""

from __future__ import annotations

from functools import cache

import pytest

from parity.cases import Case, cases, quick_cases
from parity.running import Outcome, run

QUICK = quick_cases()
REST = [case for case in cases() if case not in QUICK]


def grouped(cases: list[Case]) -> list:
    """Parameters of a test; those of as many ranks are of one process, which runs them at once."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"parity {case.ranks}"))
        for case in cases
    ]


@cache
def outcomes(ranks: int, quick: bool) -> dict[Case, Outcome]:
    """All cases of so many ranks at once: ranks that start together cost less."""
    return run([case for case in (QUICK if quick else REST) if case.ranks == ranks])


@pytest.mark.parametrize("case", grouped(QUICK))
def test_parity(case: Case) -> None:
    check(case, outcomes(case.ranks, quick=True)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", grouped(REST))
def test_the_rest_of_the_matrix(case: Case) -> None:
    check(case, outcomes(case.ranks, quick=False)[case])


def check(case: Case, outcome: Outcome) -> None:
    expected = "refused" if case.refused else "passed"
    assert outcome.kind == expected, outcome.said


def test_the_matrix_is_large() -> None:
    assert len(QUICK) >= 10
    assert {case.ranks for case in QUICK} == {2, 3, 4}

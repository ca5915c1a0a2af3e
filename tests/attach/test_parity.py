"""The parity matrix as tests; what a case is, and when it passes, is in `parity/__init__.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from parity.running import Case, Outcome, cases, quick_cases, run

QUICK = quick_cases()


def marked(case: Case) -> Any:
    """Cases of as many ranks are of one process, which runs them at once."""
    marks = [pytest.mark.xdist_group(f"parity {case.ranks}")]
    return pytest.param(case, id=str(case), marks=marks + [pytest.mark.slow] * (case not in QUICK))


@cache
def outcomes(ranks: int, quick: bool) -> dict[Case, Outcome]:
    """All cases of so many ranks at once: ranks that start together cost less."""
    return run([case for case in cases() if (case.ranks, case in QUICK) == (ranks, quick)])


@pytest.mark.parametrize("case", [marked(case) for case in cases()])
def test_parity(case: Case) -> None:
    outcome = outcomes(case.ranks, case in QUICK)[case]
    assert outcome.kind == ("refused" if case.refused else "passed"), outcome.said

"""``python -m benchmarks untuned``: what its table makes of runs."""

from __future__ import annotations

from typing import Any

from benchmarks import untuned


def record(policy: str, seed: int, rate: float, loss: float, norms: list[float]) -> dict[str, Any]:
    run = {"policy": policy, "seed": seed, "steps": len(norms), "rate": rate, "clip": 1.0}
    return {"run": run, "loss": loss, "norms": norms}


def test_rows_are_policies_with_their_settings() -> None:
    """Gaps are to dense's run of the same seed; norms are compared in the second half."""
    table = untuned.table(
        [
            record("dense", 0, 1e-3, 2.0, [9, 9, 1, 1]),
            record("dense", 1, 1e-3, 4.0, [9, 9, 2, 2]),
            record("one-bit", 0, 1e-3, 2.2, [0, 0, 2, 4]),
            record("one-bit", 1, 1e-3, 4.0, [0, 0, 4, 6]),
            record("one-bit", 0, 2e-3, 1.9, [0, 0, 1, 0.5]),
        ]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[2:] == [
        ["dense", "0.001", "1", "3.0000", "2.0000", "2", "", "1.00", "75%"],
        ["one-bit", "0.001", "1", "3.1000", "1.8000", "2", "+5.0%", "2.75", "50%"],
        ["one-bit", "0.002", "1", "1.9000", "0.0000", "1", "-5.0%", "0.75", "0%"],
    ]

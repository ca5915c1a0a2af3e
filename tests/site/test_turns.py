"""Units in turns: their order, and how many are begun at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tagc.site.anchor import in_turns


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([1, 1], "a0 b0 a1 b1 a2 b2"),
        ([2**23, 2**23, 1], "a0 b0 a1 b1 a2 c0 b2 c1 c2"),
        ([2**25, 1, 1], "a0 a1 a2 b0 c0 b1 c1 b2 c2"),
        ([1, 2**25], "a0 a1 a2 b0 b1 b2"),
        ([], ""),
    ],
    ids=["both", "as many as fit", "a large one first", "a large one last", "none"],
)
def test_order(sizes: list[int], order: str) -> None:
    done: list[str] = []

    def work(name: str) -> Iterator[None]:
        for part in range(3):
            done.append(f"{name}{part}")
            if part < 2:
                yield

    in_turns(zip(sizes, map(work, "abc"), strict=False))
    assert " ".join(done) == order

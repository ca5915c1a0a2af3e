"""Lines for who waits, and nothing for who does not."""

from __future__ import annotations

import pytest

from tagc.basics.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tagc.basics.progress.time.monotonic", lambda: now[0])
    return now


def test_what_is_done_at_once_says_nothing(clock, capsys):
    progress = Progress("parts done", 3)
    for _ in range(3):
        clock[0] += 0.5
        progress.step()
    progress.end()
    assert capsys.readouterr().err == ""


def test_a_line_now_and_then(clock, capsys):
    progress = Progress("parts done", 6)
    for _ in range(6):
        clock[0] += 1.5
        progress.step()
    progress.end()
    assert capsys.readouterr().err.splitlines() == [
        "tagc: parts done: 2 of 6, 3 s",
        "tagc: parts done: 4 of 6, 6 s",
        "tagc: parts done: done, 9 s",
    ]


def test_without_a_total_it_counts(clock, capsys):
    progress = Progress("parts done")
    clock[0] += 5
    progress.step()
    assert capsys.readouterr().err == "tagc: parts done: 1, 5 s\n"


def test_other_ranks_are_silent(clock, capsys):
    progress = Progress("parts done", 6, shown=False)
    clock[0] += 5
    progress.step()
    progress.end()
    assert capsys.readouterr().err == ""

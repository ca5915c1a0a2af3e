"""Options of `tagc explain` and `tagc advise`: each has an effect, or is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.marks import slow
from tagc.commands.cli import _parser, main

GIVEN = {
    "explain": ["explain", "1e6"],
    "advise": ["advise", "--params", "1e6", "--bandwidth", "1Gbit"],
}
# A value of each option that changes what the command prints, where the option has an effect.
VALUES = {
    "bandwidth": "2Gbit",
    "ddp": None,
    "device": "cpu",
    "device_memory": "1MB",
    "dtype": "bf16",
    "experts_per_token": "2",
    "inside_bandwidth": "1GB",
    "json": None,
    "latency": "1ms",
    "learning_rate": "1e-5",
    "memory_bandwidth": "100MB",
    "mesh": "dp=4,tp=2",
    "micro_batches": "4",
    "overlap": "0.5",
    "param_dtype": "fp32",
    "plot": "plot.png",
    "policy": "mz-hybrid",
    "ranks_per_host": "2",
    "replicas": "2",
    "shard_bandwidth": "1GB",
    "sites": "2",
    "step_time": "2s",
    "tokens": "9000",
    "world": "16",
}
MESH = "--mesh dp=4,tp=2 --tokens 64"
ONE_RANK = "--mesh tp=2 --tokens 64"
# Command lines in which other options have no effect.
BOTH = ("--world 8", "--world 8 --ddp", "--world 8 --ranks-per-host 4")
MODES = {
    "explain": (
        MESH,
        *BOTH,
        ONE_RANK,
        f"{ONE_RANK} --policy auto",
        "--world 8 --policy sites --sites 4",
        "--world 8 --policy auto --bandwidth 1Gbit",
        "--world 8 --param-dtype fp32",
    ),
    "advise": (
        MESH,
        *BOTH,
        f"{ONE_RANK} --latency 1ms",
        f"{MESH} --ranks-per-host 8 --inside-bandwidth 1GB --latency 1ms",
        "--world 8 --step-time 1ms",
        "--sites 4 --step-time 10ms --overlap 0.1 --policy hosts",
        "--world 8 --param-dtype fp32",
        "--world 8 --device cpu --memory-bandwidth 1TB",
    ),
}


def text(option: str) -> list[str]:
    value = VALUES[option]
    return [f"--{option.replace('_', '-')}", *([] if value is None else [value])]


def printed(argv: list[str], capsys: Any) -> tuple[int, str]:
    try:
        status: Any = main(argv)
    except SystemExit as exit_:
        status = exit_.code
    return status, capsys.readouterr().out


def modes() -> Iterator[Any]:
    """`make test` runs the first of each command."""
    for command, of_command in MODES.items():
        first, *others = of_command
        yield command, first
        yield from (slow(command, mode) for mode in others)


@pytest.mark.parametrize(("command", "mode"), [*modes()])
def test_every_other_option_changes_what_is_printed(command: str, mode: str, capsys: Any) -> None:
    """Or it is an error."""
    argv = [*GIVEN[command], *mode.split()]
    status, before = printed(argv, capsys)
    assert status == 0
    subparsers: Any = next(a.choices for a in _parser()._actions if isinstance(a.choices, dict))
    flags = {a.dest for a in subparsers[command]._actions if a.option_strings}
    for option in sorted(flags & VALUES.keys() - {"plot"}):
        if text(option)[0] not in argv:
            status, after = printed([*argv, *text(option)], capsys)
            assert (status, after) == (2, "") or after != before, option


@pytest.mark.parametrize(
    "argv",
    [
        ["explain", "", "--world", "8"],
        ["advise", "--model", "", "--world", "8", "--bandwidth", "1Gbit"],
        [*GIVEN["advise"], "--world", "8", "--policy", ""],
    ],
    ids=" ".join,
)
def test_empty_text_is_no_traceback(argv: list[str], capsys: Any) -> None:
    assert printed(argv, capsys) == (2, "")

"""Options of `tagc explain` and `tagc advise`: each has an effect, or is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.marks import slow
from tagc.commands.advice import ADVISE, EXPLAIN
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
    "device_memory": "10MB",
    "dtype": "bf16",
    "experts_per_token": "2",
    "full": None,
    "inside_bandwidth": "1GB",
    "json": None,
    "latency": "1ms",
    "learning_rate": "1e-5",
    "memory_bandwidth": "1TB",
    "mesh": "dp=4,tp=2",
    "micro_batches": "4",
    "ops": "reference",
    "overlap": "0.5",
    "param_dtype": "fp32",
    "plot": "plot.png",
    "policy": "hybrid-3d",
    "ranks_per_host": "2",
    "replicas": "2",
    "shard_bandwidth": "1GB",
    "sites": "2",
    "step_time": "2s",
    "tflops": "3",
    "tokens": "9000",
    "tokens_per_rank": "100",
    "world": "16",
}
# Command lines in which a situation holds, and no situation that would be an error first.
MESH = "--mesh dp=4,tp=2 --tokens 64"
SITUATIONS = {
    "with --ddp": "--world 8 --ddp",
    "without --mesh": "--world 8",
    "with --mesh": MESH,
    "with a --mesh without dimension ep": MESH,
    "with --param-dtype fp32": "--world 8 --param-dtype fp32 --policy hosts",
    "with a policy for sites": "--world 8 --policy sites",
    "with a policy that is not for sites": "--world 8",
    "with a policy without codec auto": "--world 8",
    "with a policy without exact changes": "--world 8",
    "with one data-parallel rank": "--mesh tp=2 --tokens 64 --policy auto",
    "with one data-parallel rank and without --json": "--mesh tp=2 --tokens 64",
    "with --sites": "--sites 4",
    "with --sites and --overlap": "--world 8 --sites 4 --step-time 1s --overlap 1",
    "with one rank on each host": "--world 8",
    "without --replicas": "--world 8",
    "without --device cpu": "--world 8",
    "with --memory-bandwidth": "--world 8 --device cpu --memory-bandwidth 1TB",
    "without a compute time (--step-time)": "--world 8",
    "with a --mesh whose data-parallel ranks share a host": (
        "--mesh dp=2,tp=2 --tokens 64 --ranks-per-host 4"
    ),
}


def text(option: str) -> list[str]:
    value = VALUES[option]
    return [f"--{option.replace('_', '-')}", *([] if value is None else [value])]


@pytest.mark.parametrize(
    ("command", "situation", "option"),
    [
        (command, situation, option) if i == 0 else slow(command, situation, option)
        for command, table in (("explain", EXPLAIN), ("advise", ADVISE))
        for situation, options in table.items()
        for i, option in enumerate(options)
    ],
)
def test_an_option_without_effect_is_an_error(
    command: str, situation: str, option: str, capsys: Any
) -> None:
    assert main([*GIVEN[command], *SITUATIONS[situation].split(), *text(option)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f" leave --{option.replace('_', '-')} out: it has no effect" in err


def printed(argv: list[str], capsys: Any) -> tuple[int, str]:
    try:
        status: Any = main(argv)
    except SystemExit as exit_:
        status = exit_.code
    return status, capsys.readouterr().out


def modes() -> Iterator[tuple[str, str]]:
    yield "explain", "--world 8 --policy auto --bandwidth 1Gbit"
    yield "explain", "--world 8 --ranks-per-host 4"
    yield "explain", "--mesh tp=2 --tokens 64"
    for mode in ("--world 8 --step-time 1ms", "--world 8 --ranks-per-host 4"):
        yield "advise", mode
    for command in GIVEN:
        for mode in ("--world 8", "--world 8 --ddp", MESH):
            yield command, mode
    yield "explain", "--world 8 --policy sites --sites 4"
    yield "advise", SITUATIONS["with --sites"]
    yield "advise", "--mesh tp=2 --tokens 64 --latency 1ms"


@pytest.mark.slow
@pytest.mark.parametrize(("command", "mode"), [*modes()])
def test_every_other_option_changes_what_is_printed(command: str, mode: str, capsys: Any) -> None:
    """Tables can be incomplete: an option is an error, or the answer is another one."""
    argv = [*GIVEN[command], *mode.split()]
    status, before = printed(argv, capsys)
    assert status == 0
    subparsers: Any = next(a.choices for a in _parser()._actions if isinstance(a.choices, dict))
    flags = {a.dest for a in subparsers[command]._actions if a.option_strings}
    for option in sorted(flags & VALUES.keys() - {"plot"}):
        if text(option)[0] not in argv:
            status, after = printed([*argv, *text(option)], capsys)
            assert status == 2 or after != before, option


@pytest.mark.parametrize(
    "argv",
    [
        ["explain", "", "--world", "8"],
        ["advise", "--model", "", "--world", "8", "--bandwidth", "1Gbit"],
        *([*GIVEN["advise"], "--world", "8", option, ""] for option in ("--policy", "--ops")),
    ],
    ids=" ".join,
)
def test_empty_text_is_no_traceback(argv: list[str], capsys: Any) -> None:
    assert printed(argv, capsys) == (2, "")

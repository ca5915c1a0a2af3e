"""Command lines in the documentation are ones that their programs take."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from benchmarks.suites import SUITES, load
from support.markdown import Block, blocks, pages
from support.paths import ROOT
from tagc.commands.cli import _parser

BASH = [block for page in pages() for block in blocks(page) if block.language == "bash"]


def lines(block: Block) -> list[list[str]]:
    """The words of every command of a block, without variables set before it."""
    found = []
    for line in block.text.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


def _tagc(words: list[str]) -> None:
    if words != ["--version"]:
        _parser().parse_args(words)


def _python(words: list[str]) -> None:
    assert words[0] == "-m" or (ROOT / words[0]).exists(), words
    if words[:2] == ["-m", "benchmarks"]:
        parser = argparse.ArgumentParser()
        load(words[2]).add_arguments(parser)
        parser.parse_args(words[3:])
    elif words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words
    else:
        assert words[0] != "-m", words


def _make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        found = rf"^{name} \?=" if equals else rf"^{name}:"
        assert re.search(found, makefile, re.MULTILINE), word


PROGRAMS: dict[str, Callable[[list[str]], Any]] = {
    "tagc": _tagc,
    "python": _python,
    ".venv/bin/python": _python,
    "make": _make,
    "torchrun": lambda words: get_args_parser().parse_args(words),
    "srun": lambda words: PROGRAMS[words[0]](words[1:]),
    # Tools of the system, whose arguments are their own.
    **dict.fromkeys(("pip", "find", "export"), lambda words: None),
}


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.where)
def test_commands_in_blocks(block: Block) -> None:
    for words in lines(block):
        PROGRAMS[words[0]](words[1:])


def test_commands_in_the_text() -> None:
    """Commands that a sentence names; not all of their arguments need to be there."""
    subparsers: Any = next(a.choices for a in _parser()._actions if isinstance(a.choices, dict))
    # Messages begin with the same words; one page has little else.
    for page in (page for page in pages() if page.name != "troubleshooting.md"):
        for command in re.findall(
            r"`((?:tagc|make|python -m benchmarks) [^`]+)`", page.read_text()
        ):
            if "…" in command:  # a message
                continue
            program, *words = command.split()
            if program == "make":
                _make([word for word in words if "..." not in word])
            elif program == "python":
                assert words[2] in SUITES or words[2] == "--help", command
            else:
                options = subparsers[words[0]]._option_string_actions
                asked = {word for word in words if word.startswith("--")}
                assert asked <= options.keys(), command

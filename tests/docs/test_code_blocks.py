"""Every code block of the documentation is run, and what it says that is printed is."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from support.distributed import run_ranks
from support.doc_pages import run_page
from support.markdown import Block, blocks, pages
from support.paths import ROOT
from tagc.commands.cli import main
from tagc.policy import Policy

ALL = {page.relative_to(ROOT).as_posix(): blocks(page) for page in pages()}
# In this process; the others on two ranks.
ALONE = {"docs/how-it-works.md", "docs/walk.md"}
LANGUAGES = {"python", "bash", "yaml", "text"}


def of(language: str) -> list[Block]:
    return [b for found in ALL.values() for b in found if b.language == language]


def test_every_block_says_what_it_is_in() -> None:
    for found in ALL.values():
        for block in found:
            assert block.language in LANGUAGES, block.where


def test_few_blocks_are_not_run() -> None:
    skipped = [block for found in ALL.values() for block in found if block.not_run]
    pages_of = (block.where.partition(":")[0].removeprefix("docs/") for block in skipped)
    expected = {"architecture.md": 1, "dimensions.md": 2, "extending.md": 1, "recipes.md": 5}
    assert Counter(pages_of) == expected | {"sites.md": 2}


@pytest.mark.parametrize("block", of("yaml"), ids=lambda block: block.where)
def test_policies(block: Block) -> None:
    Policy.load(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", sorted({b.where.partition(":")[0] for b in of("python")}))
def test_python(page: str, tmp_path: Path) -> None:
    if page in ALONE:
        printed = run_page(0, page, str(tmp_path))
    else:
        printed = run_ranks(run_page, 2, page, str(tmp_path))[0]
    with contextlib.chdir(tmp_path):  # which has the page's own policies
        commands = printed_by_commands(page)
    check_printed(page, printed + commands)


def test_printed_by_commands_alone() -> None:
    for page, found in ALL.items():
        if not any(b.language == "python" for b in found):
            check_printed(page, printed_by_commands(page))


def printed_by_commands(page: str) -> str:
    """What the page's ``tagc explain`` print, if any of it is shown."""
    if not shown(page):
        return ""
    text = (ROOT / page).read_text(encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for line in re.findall(r"^tagc (explain .*)$|`tagc (explain [^`]*)`", text, re.MULTILINE):
            assert main("".join(line).split()) == 0, line
    return printed.getvalue()


def shown(page: str) -> list[Block]:
    return [b for b in ALL[page] if b.language == "text" and not b.not_run]


def check_printed(page: str, printed: str) -> None:
    """Each line of the page's text blocks was printed; ``...`` is for any part of one."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for block in shown(page):
        for line in filter(None, block.text.splitlines()):
            parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
            pattern = re.compile(".*".join(parts))
            assert any(pattern.search(text) for text in lines), f"{block.where}: {line}"

"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

DOCS = ROOT / "docs"
# A fence, perhaps after a comment with the block's needs, or with the reason not to run it.
_BLOCK = re.compile(
    r"(?:^<!-- (?P<key>given|not run): (?P<value>.*?) -->\n)?"
    r"^(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One code block.

    Attributes:
        where: page and line, for people.
        language: as the fence has it.
        before: the paragraph before it.
        given: names that it assumes; empty if nothing new.
        not_run: the reason not to run it; empty if it runs.
    """

    where: str
    language: str
    text: str
    before: str
    given: str
    not_run: str


def pages() -> list[Path]:
    """All pages, the README first."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("records/*.md"))]


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        comment = {match["key"]: match["value"]}
        line = text.count("\n", 0, match.start("fence")) + 1
        found.append(
            Block(
                where=f"{page.relative_to(ROOT)}:{line}",
                language=match["language"],
                text=match["text"],
                before=text[: match.start()].rstrip().rpartition("\n\n")[2],
                given=comment.get("given", ""),
                not_run=comment.get("not run", ""),
            )
        )
    return found

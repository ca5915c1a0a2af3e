"""Pages of the documentation: their links, their place on the site, and how that is laid out."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import stage
from support.markdown import DOCS, pages
from support.paths import ROOT


class _Loader(yaml.SafeLoader):
    """Leaves alone what names Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def navigation() -> list[str]:
    """The pages in the site's navigation, in its order."""

    def of(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        return [page for one in inner for page in of(one)]

    configuration = yaml.load((DOCS / "site" / "mkdocs.yml").read_text(), _Loader)
    return of(configuration["nav"])


def anchors(page: Path) -> set[str]:
    """What links can lead to on a page: its headings, as GitHub and the site write them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    own: list[str] = re.findall(r"\]\((#[^)]*)\)", text)
    for target in [*(match[2] for match in stage.targets(text)), *own]:
        file, fragment = stage.resolve(name, target)
        file = name if target.startswith("#") else file
        assert (ROOT / file).exists(), f"{name} links to {target}"
        if fragment:
            assert fragment.removeprefix("#") in anchors(ROOT / file), f"{name} links to {target}"


def test_every_page_is_in_the_navigation_once() -> None:
    here = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    places = [stage.place(page.relative_to(ROOT).as_posix()) for page in here]
    assert sorted(navigation()) == sorted(places)


def test_the_site_is_laid_out(tmp_path: Path) -> None:
    out = tmp_path / "docs"
    out.mkdir()
    (out / "old.md").write_text("of a page that is no more")
    stage.stage(out)
    assert not (out / "old.md").exists()
    laid_out = {file.relative_to(out / "pages").as_posix() for file in (out / "pages").rglob("*.*")}
    records = {page.relative_to(DOCS).as_posix() for page in DOCS.glob("records/*.md")}
    assert {*navigation(), *records} <= laid_out  # a page links to each record
    for page in (out / "pages").rglob("*.md"):
        if page.parts[-2] != "source":
            text = page.read_text(encoding="utf-8")
            for match in stage.targets(text):
                target = page.parent / match[2].partition("#")[0]
                assert target.exists() or "source" in page.parts, f"{page}: {match[2]}"
    # The README is the first page; a policy that it names has a page that shows it.
    assert "](policies.md" in (out / "pages" / "index.md").read_text(encoding="utf-8")
    shown = (out / "pages" / "source" / "policies" / "hybrid.yaml.md").read_text(encoding="utf-8")
    assert (ROOT / "policies" / "hybrid.yaml").read_text(encoding="utf-8").rstrip() in shown


def test_messages_are_quoted_as_they_are() -> None:
    """Those in the first columns of the tables."""
    texts = literals()
    quoting = [DOCS / name for name in ("troubleshooting.md", "hosts.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in quoting)
    rows = re.findall(r"^\| (.*?) \| ", text, re.MULTILINE)
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row) if " " in quote]
    assert len(quotes) > 35
    for quote in quotes:
        for part in filter(None, (part.strip(" ,;:") for part in quote.split("…"))):
            part = part.removeprefix("tagc: ")
            assert any(part in one for one in texts), f"nothing says {part!r}"


def literals() -> list[str]:
    """The strings in the library's code; where an f-string has a value, it ends."""
    found = []
    for file in (ROOT / "tagc").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found

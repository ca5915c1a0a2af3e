"""Lay out the pages of the documentation site: ``python docs/site/stage.py FOLDER``.

In the repository a page links to any file of it, so that the links work where the repository is
read. The site has pages only, so here those files become pages, too: the README is the first one,
and every other file that a page links to is shown under ``source/``. What is generated takes the
place of its marker (``reference.py``).
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from reference import policy_reference

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent
POLICY_MARKER = "<!-- generated: the keys of a policy -->"

# Pages whose place is not that of their file.
_PLACES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
_SHOWN = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".md": "markdown"}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def place(path: str) -> str:
    """Where a file of the repository is on the site; both are relative, with ``/``."""
    if path in _PLACES:
        return _PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    target = ROOT / path
    return f"source/{path}.md" if target.is_dir() or target.suffix in _SHOWN else f"source/{path}"


def targets(text: str) -> Iterator[re.Match[str]]:
    """The links and pictures of a page that lead to files, outside of code."""
    code = [match.span() for match in _CODE.finditer(text)]
    for match in _LINK.finditer(text):
        inside = any(start <= match.start() < end for start, end in code)
        if not inside and not re.match(r"[a-z]+:|#", match[2]):
            yield match


def resolve(page: str, target: str) -> tuple[str, str]:
    """The file of the repository that a link on a page leads to, and its fragment with ``#``."""
    path, mark, fragment = target.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)), mark + fragment


def stage(out: Path) -> None:
    """Write the pages, and a copy of the site's configuration, to ``out``; what was there goes.

    Raises:
        FileNotFoundError: a page links to what does not exist.
    """
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    pages.mkdir(parents=True)
    shutil.copy(SITE / "mkdocs.yml", out)
    shutil.copy(SITE / "site.css", pages)
    waiting = [*_PLACES, *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")))]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        for found in _write(path, pages):
            if found not in seen:
                seen.add(found)
                waiting.append(found)


def _write(path: str, pages: Path) -> list[str]:
    """Write one file's page; the files that it links to."""
    source, target = ROOT / path, pages / place(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        inside = sorted(f"{path}/{file.name}" for file in source.iterdir() if file.suffix in _SHOWN)
        lines = [f"- [{name}]({_relative(path, name)})" for name in inside]
        target.write_text("\n".join([f"# {path}/", "", *lines, ""]), encoding="utf-8")
        return inside
    if not target.name.endswith(".md"):
        shutil.copy(source, target)
        return []
    text = source.read_text(encoding="utf-8")
    if place(path).startswith("source/"):
        shown = f"# {path}\n\n`````{_SHOWN[source.suffix]}\n{text.rstrip()}\n`````\n"
        target.write_text(shown, encoding="utf-8")
        return []
    if POLICY_MARKER in text:
        text = text.replace(POLICY_MARKER, policy_reference())
    linked, parts, end = [], [], 0
    for match in targets(text):
        file, fragment = resolve(path, match[2])
        if not (ROOT / file).exists():
            raise FileNotFoundError(f"{path} links to {match[2]}, and there is no {file}")
        linked.append(file)
        parts += [text[end : match.start()], match[1], _relative(path, file) + fragment, match[3]]
        end = match.end()
    target.write_text("".join([*parts, text[end:]]), encoding="utf-8")
    return linked


def _relative(page: str, file: str) -> str:
    return posixpath.relpath(place(file), posixpath.dirname(place(page)) or ".")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/site/stage.py FOLDER")
    stage(Path(sys.argv[1]))

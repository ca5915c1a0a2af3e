"""Breaks the library in one way at a time, and says which test notices.

Usage: python -m mutants [NAME ...] [--all], in the repository's root with PYTHONPATH=tests.

Every `tests/mutants/*.txt` is a mutant: a paragraph that says what it breaks, then one or more
changes. A change names a file after `--- `, and has lines in the manner of a diff: `-` for a line
that goes, `+` for one that comes, a space for one that stays. The lines that go and stay must stand
in the file, one after another, exactly once; so there are no line numbers to keep up to date.

A mutant is tried in a temporary copy of the repository, with the test that caught it last, then
with the tests of its own room, then with all others that `make test` runs, up to the first failure.
The test must pass in a copy without the mutant. `caught.md` keeps the results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = HERE / "caught.md"
FAST = "not slow and not device and not gpu and not network and not recipes"
# As `make test` runs them: without a path, so that kernels are compiled before the workers start.
EVERYTHING = ("-n", "2", "--dist", "loadgroup")
# Folders at the top of the repository that are packages inside `tagc`.
PACKAGES = ("triton_kernels", "policies", "benchmarks")
TITLE = """# Mutants

`make mutants` writes this table: the first test that fails with each mutant.

| mutant | what it breaks | caught by |
|---|---|---|
"""
NOTHING = "nothing"


class MutantError(Exception):
    """A mutant that cannot be planted."""


@dataclass(frozen=True)
class Mutant:
    """One planted error.

    Attributes:
        breaks: what it breaks, in a sentence.
        changes: the file, the lines that must stand there, and those that replace them.
    """

    name: str
    breaks: str
    changes: tuple[tuple[str, str, str], ...]

    @classmethod
    def read(cls, file: Path) -> Mutant:
        """The mutant in a file."""
        head, *parts = file.read_text().split("\n--- ")
        changes = []
        for part in parts:
            path, *lines = part.rstrip("\n").split("\n")
            old = [line[1:] for line in lines if line[:1] != "+"]
            new = [line[1:] for line in lines if line[:1] != "-"]
            changes.append((path.strip(), *("".join(f"{x}\n" for x in xs) for xs in (old, new))))
        return cls(file.stem, " ".join(head.split()), tuple(changes))

    def plant(self, copy: Path) -> None:
        """Make the changes in a copy of the repository."""
        for path, old, new in self.changes:
            file = copy / path
            if not file.exists():
                raise MutantError(f"{self.name}: there is no {path}")
            # The lines are whole ones.
            text = "\n" + file.read_text()
            if text.count("\n" + old) != 1 or old == new:
                found = text.count("\n" + old)
                raise MutantError(f"{self.name}: {path} has its lines {found} times, not once")
            file.write_text(text.replace("\n" + old, "\n" + new)[1:])

    def near(self) -> list[str]:
        """Tests of the room that it is in, those of the same file first."""
        found: list[str] = []
        for path, _, _ in self.changes:
            file = Path(path)
            room = file.parts[1] if file.parts[0] == "tagc" else file.parts[0].partition("_")[0]
            tests = sorted((ROOT / "tests" / room).glob("test_*.py"))
            words = {word.rstrip("s") for word in file.stem.split("_")}
            tests.sort(key=lambda t: -len(words & {w.rstrip("s") for w in t.stem.split("_")}))
            found += [str(test.relative_to(ROOT)) for test in tests]
        return list(dict.fromkeys(found))


def copy_to(folder: Path) -> Path:
    """A copy of the repository's files, with what was compiled of them, which imports itself."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)
    for parent in {file.parent for file in files}:
        if (ROOT / parent / "__pycache__").is_dir():
            shutil.copytree(ROOT / parent / "__pycache__", folder / parent / "__pycache__")
    for package in PACKAGES:
        (folder / "tagc" / package).symlink_to(folder / package)
    return folder


def failures(copy: Path, tests: Sequence[str], *options: str) -> list[str]:
    """The tests that fail in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    done = subprocess.run(
        [*command, "-m", FAST, *options, *tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    marks = ("FAILED ", "ERROR ")
    lines = [line for line in done.stdout.splitlines() if line.startswith(marks)]
    names = (line.partition(" ")[2].partition(" - ")[0] for line in lines)
    return [re.sub(r"@[^\]]*$", "", name) for name in names]  # without a group of xdist's


def stages(mutant: Mutant, recorded: str, copy: Path) -> Iterator[list[str]]:
    """What to run, one after another: arguments of pytest."""
    if (copy / recorded.partition("::")[0]).is_file():
        yield [recorded]
    near = mutant.near()
    if near:
        yield near
    yield [*EVERYTHING, *(f"--ignore={copy / test}" for test in near)]


def catching(mutant: Mutant, recorded: str, clean: Path, folder: Path, *, every: bool) -> list[str]:
    """The first test that fails with a mutant, or all of them; empty if none does."""
    copy = copy_to(folder)
    mutant.plant(copy)
    if every:
        return failures(copy, EVERYTHING)
    for tests in stages(mutant, recorded, copy):
        for test in failures(copy, tests, "-x")[:1]:
            if failures(clean, [test]):
                raise MutantError(f"{mutant.name}: {test} also fails without it")
            return [test]
    return []


def read_record() -> dict[str, str]:
    """The test that caught each mutant last."""
    rows = [line.strip("| ").split(" | ") for line in RECORD.read_text().splitlines()[6:]]
    return {name: test.strip("`") for name, _, test in rows}


def write_record(mutants: Sequence[Mutant], record: dict[str, str]) -> None:
    """Write the table of all mutants."""
    rows = [f"| {m.name} | {m.breaks} | `{record.get(m.name, NOTHING)}` |\n" for m in mutants]
    RECORD.write_text(TITLE + "".join(rows))


def main() -> int:
    """Try mutants, print a row for each, and return how many nothing catches."""
    parser = argparse.ArgumentParser(prog="mutants", description="Plant errors, run the tests.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; default: all")
    parser.add_argument("--all", action="store_true", help="every test that fails, for minutes")
    given = parser.parse_args()
    mutants = [Mutant.read(file) for file in sorted(HERE.glob("*.txt"))]
    unknown = set(given.names) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    record, bad = read_record(), 0
    with tempfile.TemporaryDirectory() as temporary:
        clean = copy_to(Path(temporary) / "clean")
        for mutant in mutants:
            if given.names and mutant.name not in given.names:
                continue
            began, folder = time.monotonic(), Path(temporary) / mutant.name
            try:
                last = record.get(mutant.name, NOTHING)
                found = catching(mutant, last, clean, folder, every=given.all)
            except MutantError as error:
                print(f"ERROR {error}", flush=True)
                bad += 1
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            bad += not found
            row = f"{mutant.name} ({time.monotonic() - began:.0f} s): {mutant.breaks}"
            print(row, *(found or [NOTHING]), sep="\n    ", flush=True)
            record[mutant.name] = found[0] if found else NOTHING
            write_record(mutants, record)
    print(f"{bad} mutants are not caught, or could not be tried" if bad else "all are caught")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())

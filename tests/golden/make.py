"""Makes the golden files, or some of them: ``python -m golden.make [FILE ...] [POLICY ...]``.

Commit what changes only with what the change log says about it: a difference ends the exact resume
of somebody's run. Checkpoints that there are stay, as earlier versions made them, unless the policy
is named.
"""

from __future__ import annotations

import io
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

from golden.checkpoints import CASES, FORMATS, RANKS, resume, train
from golden.identities import identities
from golden.messages import DTYPES, hashes
from golden.messages import RANKS as NUMBERS
from support.distributed import run_ranks

HERE = Path(__file__).parent
CHECKPOINTS = HERE / "checkpoints.tar.xz"


def make_messages(_: Sequence[str]) -> None:
    """What codecs send and add up."""
    found: dict[str, str] = {}
    for ranks, dtype in product(NUMBERS, DTYPES):
        found |= hashes(ranks, dtype)
    write("messages.txt", found)


def make_identities(_: Sequence[str]) -> None:
    """By what checkpoints know their policy and plan."""
    write("identities.txt", identities())


def make_checkpoints(again: Sequence[str]) -> None:
    """A checkpoint of every shipped policy, and what comes after it."""
    policies = list(CASES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(folder)
        for made in folder.iterdir():
            if made.name in again or made.name not in policies:
                shutil.rmtree(made)
        missing = [policy for policy in policies if not (folder / policy).exists()]
        run_ranks(train, RANKS, missing, folder, timeout=240)
        CHECKPOINTS.write_bytes(lzma.compress(_packed(folder), preset=9 | lzma.PRESET_EXTREME))
        first, second = (resumed(folder, policies, form) for form in FORMATS)
    assert first == second, "the formats resume to different steps"
    write("resumed.txt", first)


FILES: dict[str, Callable[[Sequence[str]], None]] = {
    "messages": make_messages,
    "identities": make_identities,
    "checkpoints": make_checkpoints,
}


def resumed(folder: Path, policies: list[str], form: str) -> dict[str, str]:
    """Hashes by policy and rank."""
    said = run_ranks(resume, RANKS, policies, folder, form, timeout=220)
    return {f"{p} | rank {rank}": found[p] for rank, found in enumerate(said) for p in policies}


def unpack(folder: Path) -> None:
    """The golden checkpoints, each in a folder of its policy's name."""
    with tarfile.open(CHECKPOINTS) as archive:
        archive.extractall(folder, filter="data")


def read(name: str) -> dict[str, str]:
    """What is in a file, by case."""
    lines = (HERE / name).read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def write(name: str, found: Mapping[str, str]) -> None:
    """The inverse."""
    (HERE / name).write_text("".join(f"{case}: {value}\n" for case, value in found.items()))


def _packed(folder: Path) -> bytes:
    """A tar file that says nothing of when and by whom it was made."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                entry.size = path.stat().st_size
                archive.addfile(entry, io.BytesIO(path.read_bytes()))
    return content.getvalue()


if __name__ == "__main__":
    named = [name for name in sys.argv[1:] if name not in FILES]
    if unknown := set(named) - set(CASES):
        sys.exit(f"no file and no policy: {', '.join(sorted(unknown))}")
    for chosen in [name for name in sys.argv[1:] if name in FILES] or FILES:
        FILES[chosen](named)

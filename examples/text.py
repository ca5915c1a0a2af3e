"""Real text without a download: the standard library's own source, or any file, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 6_000_000
MIN_BYTES = 100_000
BLOCK = 16_384
# Third-party code differs between machines; tests and codec tables are mostly repetition.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Bytes to train on and bytes held out, both uint8 `[n]`."""

    source: str
    train: Tensor
    validation: Tensor

    def batch(
        self, size: int, length: int, *, seed: int, step: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Random tokens and next-byte targets, int64 `[size, length]` each.

        They depend only on the arguments, so two runs see the same batches.
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 65_536 + rank)
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return _windows(self.train, starts, length)

    def held_out(self, size: int, length: int, *, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """This rank's share of about `size` evenly spaced windows of the held-out bytes."""
        # The same number on every rank: FSDP's collectives must match.
        count = max(1, size // ranks) * ranks
        starts = torch.linspace(0, len(self.validation) - length - 1, count).long()
        return _windows(self.validation, starts[rank::ranks], length)


def load_corpus(path: Path | None = None) -> Corpus:
    """Read `path`, or without one the standard library's `.py` files (at most `MAX_BYTES`).

    Every tenth block of 16 KiB is held out. Raises FileNotFoundError for a missing file and
    ValueError for one with under `MIN_BYTES` bytes.
    """
    if path is None:
        source, raw = "the standard library's source files", _standard_library()
    elif path.is_file():
        source, raw = str(path), path.read_bytes()
    else:
        raise FileNotFoundError(f"no such file: {path}")
    if len(raw) < MIN_BYTES:
        raise ValueError(
            f"{source}: {len(raw):,} bytes of text, at least {MIN_BYTES:,} are needed; "
            "name a larger file with --data"
        )
    return split(source, raw)


def split(source: str, raw: bytes) -> Corpus:
    """Hold out every tenth block of 16 KiB."""
    blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).split(BLOCK)
    # Blocks, not the tail: the files are sorted, so the tail has other subjects.
    train = [block for i, block in enumerate(blocks) if i % 10 != 5]
    return Corpus(source=source, train=torch.cat(train), validation=torch.cat(blocks[5::10]))


def _standard_library() -> bytes:
    text = bytearray()
    for file in library_files():
        text += file.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return bytes(text[:MAX_BYTES])


def library_files() -> Iterator[Path]:
    """The standard library's `.py` files, in order, except for those in `SKIPPED`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(file.relative_to(root).parts):
            yield file


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(length + 1)].long()  # [size, length + 1]
    return windows[:, :-1], windows[:, 1:]

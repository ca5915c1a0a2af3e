"""Files with a few changes, from a fixed seed."""

from __future__ import annotations

import random
import re

import pytest

QUICK, ALL = 100, 10_000
# A hang is anything that takes this long; files are a few kilobytes.
SECONDS = 5.0
by_count = pytest.mark.parametrize("count", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)])


def mutated(content: bytes, words: list[bytes], draw: random.Random) -> bytes:
    """A few changes of bytes, runs of bytes, words or lengths."""
    out = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, length = draw.randrange(len(out) + 1), draw.choice((1, 1, 4, 30))
        kind = draw.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = draw.randrange(256)
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            start = draw.randrange(len(out) + 1)
            out[at:at] = out[start : start + length]
        elif kind == 4:
            out[at:at] = draw.choice(words)
        elif kind == 5:
            found = list(re.finditer(rb"[A-Za-z_]+|[0-9.]+", out[at : at + 200]))
            if found:
                word = draw.choice(found)
                out[at + word.start() : at + word.end()] = draw.choice(words)
        elif draw.random() < 0.2:
            del out[at:]
    return bytes(out)

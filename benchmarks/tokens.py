"""Text as bytes, in words, and in byte pairs, which are made once and kept in a file, for models
larger than bytes or words suit.

    python -m benchmarks.tokens runs/text/tokens.npz /usr/share/man/man? /usr/share/perl

The file has the training part, the held-out part, and a line about where they are from. The package
``tokenizers`` makes it, and nothing else needs that.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import random
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

from examples.text import Corpus, library_files, split

TEXT = {".py", ".pm", ".pl", ".pod", ".rst", ".txt", ".md", ".html", ".gz"}
BLOCK = 4096  # tokens
MOST = 85_000_000  # bytes of text
VOCABULARY = 24_576  # byte pairs
# Names and numbers, runs of white space, and any other character by itself.
_TOKEN = re.compile(rb"\w+|\s+|.", re.DOTALL)
_DOCSTRING = re.compile(rb'"""(.*?)"""', re.DOTALL)
RARE = 0
"""The token of all words that are not among the most frequent."""


@cache
def load(file: Path) -> Corpus:
    """The text of a file that :func:`main` made."""
    with np.load(file) as found:
        train, held_out = (
            torch.from_numpy(found[n].astype(np.int32)) for n in ("train", "validation")
        )
        return Corpus(source=str(found["source"]), train=train, validation=held_out)


def texts(folders: Iterable[Path], most: int) -> list[str]:
    """Different text files in random order, ``most`` bytes of them."""
    files = {f.resolve() for folder in folders for f in folder.rglob("*") if f.suffix in TEXT}
    chosen = sorted(f for f in files if f.is_file())
    random.Random(0).shuffle(chosen)
    found: dict[bytes, None] = {}
    size = 0
    for file in chosen:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if raw not in found and b"\0" not in raw:
            found[raw] = None
            size += len(raw)
        if size > most:
            break
    return [raw.decode(errors="ignore") for raw in found]


def documentation() -> Corpus:
    """Prose instead of source code: what ``help`` knows of Python, and the standard library's
    docstrings, as bytes."""
    pages = [topics[name].encode() for name in sorted(topics)]
    for file in library_files():
        pages += _DOCSTRING.findall(file.read_bytes())
    return split("Python's documentation", b"\n".join(pages))


def in_words(corpus: Corpus, vocabulary: int) -> Corpus:
    """The same bytes in words: the most frequent of the part that is trained on, and ``RARE``. An
    embedding then has many rows, most of which no token of a step touches."""
    parts = [_TOKEN.findall(p.numpy().tobytes()) for p in (corpus.train, corpus.validation)]
    frequent = Counter(parts[0]).most_common(vocabulary - 1)
    numbers = {word: i for i, (word, _) in enumerate(frequent, RARE + 1)}
    train, validation = (
        torch.tensor([numbers.get(word, RARE) for word in part], dtype=torch.int32)
        for part in parts
    )
    return Corpus(source=f"{corpus.source}, in words", train=train, validation=validation)


def main() -> None:
    """Make a file of byte pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    tokenizers: Any = importlib.import_module("tokenizers")
    found = texts(args.folders, MOST)
    pairs = tokenizers.ByteLevelBPETokenizer()
    # A part of the text is enough to find the pairs.
    some = found[: max(1, len(found) // 8)]
    pairs.train_from_iterator(some, VOCABULARY, special_tokens=["<|end|>"])
    # One by one: what the package knows of each token takes much memory.
    tokens = np.concatenate([np.array([*pairs.encode(text).ids, 0], np.uint16) for text in found])
    blocks = np.split(tokens, range(BLOCK, len(tokens), BLOCK))
    train = np.concatenate([block for i, block in enumerate(blocks) if i % 20 != 5])
    held_out = np.concatenate(blocks[5::20])
    source = f"{len(tokens):,} byte pairs of {len(found):,} files"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, source=source, train=train, validation=held_out)
    print(f"{source}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

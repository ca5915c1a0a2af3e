"""Words instead of bytes: an embedding with many rows, most of which no token of a step touches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Names and numbers, runs of white space, and any other character by itself.
_TOKEN = re.compile(rb"\w+|\s+|.", re.DOTALL)
RARE = 0
"""The token of all words that are not among the most frequent."""


def in_words(corpus: Any, vocabulary: int) -> Any:
    """The same text in words: the most frequent ones of the part that is trained on, and ``RARE``.

    Args:
        corpus: ``text.Corpus`` of bytes.
    """
    train, validation = (_split(part) for part in (corpus.train, corpus.validation))
    frequent = Counter(train).most_common(vocabulary - 1)
    numbers = {word: i for i, (word, _) in enumerate(frequent, RARE + 1)}
    return type(corpus)(
        source=f"{corpus.source}, in words",
        train=_numbered(train, numbers),
        validation=_numbered(validation, numbers),
    )


def _split(text: Tensor) -> list[bytes]:
    return _TOKEN.findall(text.numpy().tobytes())


def _numbered(words: Sequence[bytes], numbers: dict[bytes, int]) -> Tensor:
    return torch.tensor([numbers.get(word, RARE) for word in words], dtype=torch.int32)

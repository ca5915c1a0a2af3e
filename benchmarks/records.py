"""Results as JSON lines: one object per line, written as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def append(file: Path, record: Record) -> None:
    """Add one line, and close the file, so that an interrupted run keeps what it measured."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")


def read(files: Iterable[Path]) -> list[Record]:
    """All records of some files, in order.

    Raises:
        ValueError: if a line is not a JSON object, naming file and line.
    """
    records = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{file}:{number}: not a JSON object")
            records.append(record)
    return records


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

"""What all benchmarks write: results as JSON lines, the machine behind them, and tables."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import tagc

Record = dict[str, Any]


def add_output(parser: argparse.ArgumentParser, file: str | None = None) -> None:
    """Add ``--json``. ``file``: where a suite always keeps its results, so that a second call
    resumes."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=file and Path(file),
        help="append the results, one per line" if file is None
        else "results, one per line; runs that it already has are not made again (%(default)s)",
    )  # fmt: skip


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


class Results:
    """The records of one kind in a file, each with the key of what was run. What the file has is
    not run again, so the same command continues an interrupted run.

    Args:
        field: of a record, which has its key.
        kind: entries that all records of the kind have, and every new one gets.
    """

    def __init__(self, file: Path, field: str, kind: Record) -> None:
        self._file, self._field, self._kind = file, field, kind
        found = read([file]) if file.exists() else []
        self._found = {
            _text(r[field]): r for r in found if field in r and kind.items() <= r.items()
        }

    @property
    def records(self) -> list[Record]:
        """All of them, the last one of each key."""
        return list(self._found.values())

    def get(self, key: Record) -> Record | None:
        """The record of a key, None if it is not there yet."""
        return self._found.get(_text(key))

    def add(self, key: Record, numbers: Record, *, write: bool = True) -> None:
        """Take in a record; on the rank that writes, append it to the file."""
        record = self._kind | {self._field: key} | numbers
        self._found[_text(key)] = record
        if write:
            append(self._file, record)


def measured(
    field: str, runs: Iterable[tuple[str, Callable[[], Record]]], facts: Record, file: Path | None
) -> list[Record]:
    """Do runs one after the other: their records, with their names in ``field``, each written as
    soon as it is there. One that fails, out of memory say, takes nothing from the others."""
    records = []
    for name, run in runs:
        began = time.monotonic()
        try:
            found = run()
        except Exception as error:
            traceback.print_exc()
            first, *_ = [*str(error).strip().splitlines(), ""]
            found = {"failed": f"{type(error).__name__}: {first}"}
        gc.collect()
        torch.cuda.empty_cache()
        records.append(facts | {field: name} | found)
        if file:
            append(file, records[-1])
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return records


def _text(key: Record) -> str:
    return json.dumps(key, sort_keys=True)


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine(device: torch.device | str = "cpu") -> Record:
    """Date, device, threads, versions, and the load of the last minute."""
    device = torch.device(device)
    facts: Record = {
        "date": datetime.date.today().isoformat(),
        "device": device.type,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tagc": tagc.__version__,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["triton"] = importlib.import_module("triton").__version__
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

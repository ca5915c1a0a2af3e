"""The numbers of :mod:`.compiled` as Markdown; importing this needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence

from .records import Record, markdown


def table(records: Sequence[Record]) -> str:
    """The records of :func:`rows` as Markdown; spilled and shared are bytes."""

    def show(value: object) -> str:
        if not isinstance(value, list):
            return str(value)
        least, most = value
        return str(least) if least == most else f"{least}–{most}"

    head = ["arch", "kernel", "variants", "registers", "spilled", "shared", "instructions"]
    return markdown(head, ([show(record[key]) for key in head] for record in records))

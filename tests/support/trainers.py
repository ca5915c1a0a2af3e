"""Stand-ins for trainers and for handles, and integrations that are imported with them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

HERE = "tagc.integrations."


class Calls(list):
    """What was wrapped, saved and loaded, in order."""

    def add(self, name: str, result: Any = None) -> Any:
        def note(model: Any, what: Any = None, *args: Any, **options: Any) -> Any:
            what = what() if name == "load" else what  # which says where from
            self.append((name, what, options) if options else (name, what))
            return model if result is None else result

        return note


def imported(monkeypatch: pytest.MonkeyPatch, name: str, **others: ModuleType | None) -> Any:
    """An integration, imported anew with stand-ins for other packages; None is not installed."""
    for other, module in others.items():
        monkeypatch.setitem(sys.modules, other.replace("__", "."), module)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, HERE + name, raising=False)
    return importlib.import_module(HERE + name)


def module(**names: Any) -> Any:
    made = ModuleType("stand-in")
    vars(made).update(names)
    return made


class Handle:
    """A compressor that notes what it is asked for."""

    groups = ()

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.asked.append((name, *args))

"""Count how many hand-labelled parameter names of many model families a role table misjudges.

``cd tests && python -m support.role_names [ROLES.py]`` prints the counts for the role table in that
file, or for tagc's own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tagc.policy import roles

FILE = Path(__file__).parent.parent / "data" / "role-names.txt"


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Parameters with the same name except for numbers: their label, and how many there are."""

    family: str
    role: str
    matrix: bool
    count: int
    shape: tuple[int, ...]
    name: str


def labelled() -> list[Labelled]:
    """Every line of the file."""
    found, family = [], ""
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            family = line.strip("[]")
        elif not line.startswith("#"):
            role, count, shape, name = line.split(" ", 3)
            found.append(
                Labelled(
                    family=family,
                    role=role.removesuffix("!"),
                    matrix=not role.endswith("!"),
                    count=int(count),
                    shape=() if shape == "-" else tuple(map(int, shape.split("x"))),
                    name=name,
                )
            )
    return found


def judged(table: ModuleType) -> Callable[[Labelled], tuple[str, bool]]:
    """A role table's verdict on a parameter: its role, and whether it is a matrix."""

    def of(param: Labelled) -> tuple[str, bool]:
        info: Any = table.ParamInfo.of(param.name, param.shape)
        # Tables before `no_matrix` used dimensions.
        return info.role, not getattr(info, "no_matrix", info.ndim < 2)

    return of


def misjudged(table: ModuleType) -> dict[str, tuple[int, int]]:
    """For each family, the number of parameters and of misjudged ones."""
    judge, counts = judged(table), dict[str, tuple[int, int]]()
    for param in labelled():
        total, wrong = counts.get(param.family, (0, 0))
        is_wrong = judge(param) != (param.role, param.matrix)
        counts[param.family] = (total + param.count, wrong + param.count * is_wrong)
    return counts


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_roles", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["other_roles"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    counts = misjudged(_load(sys.argv[1]) if len(sys.argv) > 1 else roles)
    for family, (total, wrong) in counts.items():
        print(f"{family:55} {total:6} {wrong:6}")
    totals = [sum(column) for column in zip(*counts.values(), strict=True)]
    print(f"{f'{len(counts)} families':55} {totals[0]:6} {totals[1]:6}")

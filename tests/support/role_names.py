"""Hand-labelled parameter names of many model families, and which of them tagc misjudges.

``cd tests && python -m support.role_names`` prints the counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from support.paths import DATA
from tagc.policy import ParamInfo


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Parameters with the same name except for numbers: their label, and how many there are."""

    family: str
    role: str
    matrix: bool
    count: int
    shape: tuple[int, ...]
    name: str

    @property
    def judged(self) -> tuple[str, bool]:
        """What tagc takes it for: its role, and whether it is a matrix."""
        info = ParamInfo.of(self.name, self.shape)
        return info.role, not info.no_matrix

    @property
    def misjudged(self) -> bool:
        return self.judged != (self.role, self.matrix)


def labelled() -> list[Labelled]:
    """Every line of `tests/data/role-names.txt`."""
    found, family = [], ""
    for line in (DATA / "role-names.txt").read_text().splitlines():
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


if __name__ == "__main__":
    every, wrong = Counter[str](), Counter[str]()
    for param in labelled():
        every[param.family] += param.count
        wrong[param.family] += param.count * param.misjudged
    for family, count in every.items():
        print(f"{family:55} {count:6} {wrong[family]:6}")
    print(f"{f'{len(every)} families':55} {every.total():6} {wrong.total():6}")

"""The watched interpreter names the planted errors that it can see, in every order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from device import faulty
from device.interpreted import ORDERS, Watched
from support.paths import ROOT

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

# What the interpreter says of each; of the others it has nothing to say.
NAMED = {
    "mask": "OutOfBoundsError faulty.py",
    "grid": "AssertionError wrong results",
    "barrier": "without a barrier",
    "programs": "by another program",
}


def main(results: Path) -> None:
    """In a process of its own: what is said of every kernel, with its error and without."""
    said = {}
    for order in ORDERS:
        for name in faulty.FAULTS:
            for wrong in (False, True):
                watched = Watched(order)
                try:
                    with watched.installed():
                        faulty.FAULTS[name](wrong)
                    said[f"{order} {name} {wrong}"] = ""
                except AssertionError as error:
                    said[f"{order} {name} {wrong}"] = f"{type(error).__name__} {error}"
                assert watched.launches == 1
    results.write_text(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    results = tmp_path_factory.mktemp("interpreted") / "said.json"
    subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", __file__, str(results)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tests")}, check=True,
    )  # fmt: skip
    return json.loads(results.read_text())


@pytest.mark.xdist_group("interpreted faults")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", faulty.FAULTS)
def test_names_the_errors_that_it_sees(said, name, order):
    assert said[f"{order} {name} False"] == ""
    if name in NAMED:
        assert NAMED[name] in said[f"{order} {name} True"]
    else:
        assert said[f"{order} {name} True"] == ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))

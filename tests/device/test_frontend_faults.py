"""Package ``ttsem`` names the planted errors that it can see; run by ``device.frontend``."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

from device import faulty

pytestmark = pytest.mark.frontend

# Kinds of faults and a part of the message; the others come out right.
NAMED = {
    "mask": "oob_read",
    "grid": "wrong results",
    "programs": "race",
}


@pytest.mark.parametrize("name", faulty.CORRECT)
def test_finds_nothing_where_nothing_is_wrong(name):
    faulty.CORRECT[name]()


@pytest.mark.parametrize("name", faulty.FAULTS)
def test_names_the_errors_that_it_sees(name):
    sanitize: Any = importlib.import_module("ttsem.sanitize")
    said = ""
    try:
        faulty.FAULTS[name](True)
    except sanitize.KernelFault as fault:
        said = f"{fault.fault.kind} {fault.fault.source_file}"
    except AssertionError as error:
        said = str(error)
    if name not in NAMED:
        assert not said
    else:
        assert said.startswith(NAMED[name])
        assert NAMED[name] == "wrong results" or said.endswith("faulty.py")

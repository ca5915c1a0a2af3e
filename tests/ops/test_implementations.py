"""Which implementation of the operators runs, the warning when one cannot, and that all have the
operators of the contract."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from support.launches import kernels
from tagc.ops import Ops, compiles_ahead, cpu, get_ops, reference
from tagc.ops.implementations import _warn_reference
from tagc.selfcheck.calls import OPERATORS


def test_choice(monkeypatch):
    monkeypatch.delenv("TAGC_OPS", raising=False)
    assert get_ops("cpu") is cpu
    assert get_ops("cpu", "reference") is reference
    monkeypatch.setenv("TAGC_OPS", "reference")
    assert get_ops("cpu") is reference
    assert get_ops("cpu", "cpu") is cpu


def test_a_gpu_gets_the_triton_kernels(monkeypatch):
    monkeypatch.delenv("TAGC_OPS", raising=False)
    assert get_ops("cuda") is get_ops("cuda", "triton")
    assert "triton_kernels" in str(get_ops("cuda"))
    assert compiles_ahead(get_ops("cuda"))
    assert not any(compiles_ahead(get_ops("cpu", name)) for name in ("cpu", "reference"))


def test_without_triton_the_reference_runs_with_a_warning(monkeypatch):
    _warn_reference.cache_clear()  # it warns once
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="package triton, which is not installed"):
        assert get_ops("cuda") is reference


def test_the_kernels_package_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import tagc.triton_kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_old_gpu_gets_the_reference(monkeypatch):
    _warn_reference.cache_clear()
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert get_ops("cuda:1") is get_ops("cuda", "triton")
    capability = (7, 5)
    with pytest.warns(UserWarning, match=r"need compute capability 8\.0, and cuda:1 has 7\.5"):
        assert get_ops("cuda:1") is reference


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("cpu", "fast", "unknown implementation 'fast'; choose from auto, reference, cpu, triton"),
        ("cuda", "cpu", "'cpu' does not run on cuda"),
        ("cpu", "triton", "'triton' does not run on cpu"),
    ],
)
def test_what_cannot_run_is_refused(device, name, message):
    with pytest.raises(ValueError, match=message):
        get_ops(device, name)


CONTRACT = {name: getattr(reference, name) for name in vars(Ops) if not name.startswith("_")}


@pytest.fixture(params=["reference", "cpu", "triton"])
def ops(request) -> ModuleType:
    if request.param == "triton":
        pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
        return kernels("ops")
    return {"reference": reference, "cpu": cpu}[request.param]


def test_has_the_operators_and_signatures_of_the_contract(ops):
    launching = {name for name in CONTRACT if name != "release"}
    assert launching == {*OPERATORS}
    for name, wanted in CONTRACT.items():
        found = inspect.signature(getattr(ops, name), eval_str=True)
        assert found == inspect.signature(wanted, eval_str=True), name

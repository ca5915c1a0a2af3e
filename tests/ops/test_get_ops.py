"""Which implementation runs, and what is said when one cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from support.kernel_cases import kernels
from tagc.ops import compiles_ahead, cpu, get_ops, reference
from tagc.ops.implementations import _warn_reference


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


WITHOUT = {
    "no triton": ("package triton, which is not installed", "importlib.util.find_spec", None),
    "amd": ("for NVIDIA", "torch.version.hip", "6.2"),
}


@pytest.mark.parametrize("why", WITHOUT)
def test_what_cannot_run_the_kernels_gets_the_reference_with_a_warning(why, monkeypatch):
    message, name, value = WITHOUT[why]
    _warn_reference.cache_clear()  # it warns once
    monkeypatch.setattr(name, (lambda _: None) if value is None else value)
    with pytest.warns(UserWarning, match=message):
        assert get_ops("cuda") is reference


def test_the_kernels_package_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import tagc.triton_kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_an_old_gpu_gets_the_reference(capability, runs, monkeypatch):
    _warn_reference.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if runs:
        assert get_ops("cuda:1") is get_ops("cuda", "triton")
        return
    with pytest.warns(UserWarning, match=r"need compute capability 8\.0, and cuda:1 has 7\.5"):
        assert get_ops("cuda:1") is reference


def test_another_device_gets_the_reference_with_a_warning():
    _warn_reference.cache_clear()
    with pytest.warns(UserWarning, match="no other implementation for devices of type 'xpu'"):
        assert get_ops("xpu") is reference


def test_scratch_is_released():
    ops, scratch = get_ops("cuda", "triton"), kernels("scratch")
    made = scratch.buffer("test", (3,), torch.int32, torch.device("cpu"), None)
    assert scratch.buffer("test", (3,), torch.int32, torch.device("cpu"), None) is made
    ops.release()
    assert scratch.buffer("test", (3,), torch.int32, torch.device("cpu"), None) is not made
    get_ops("cpu", "cpu").release()
    get_ops("cpu", "reference").release()


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

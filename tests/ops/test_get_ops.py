"""Which implementation runs, and what is said when one cannot."""

from __future__ import annotations

import pytest
import torch

from support.kernel_cases import kernels
from support.sketch_cases import CPU, REFERENCE
from tagc.ops import cpu, get_ops, reference
from tagc.ops.implementations import _warn_reference


def test_choice(monkeypatch):
    assert get_ops("cpu") is cpu
    assert get_ops("cpu", "reference") is reference
    monkeypatch.setenv("TAGC_OPS", "reference")
    assert get_ops("cpu") is reference
    assert get_ops("cpu", "cpu") is cpu


def test_a_gpu_gets_the_reference_with_a_warning():
    _warn_reference.cache_clear()  # it warns once
    with pytest.warns(UserWarning, match="eager reference on cuda"):
        assert get_ops("cuda") is reference


def test_triton_is_for_cuda():
    assert hasattr(get_ops("cuda", "triton"), "encode")


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


def test_get_ops(monkeypatch):
    monkeypatch.delenv("TAGC_OPS", raising=False)
    assert get_ops("cpu") is CPU
    monkeypatch.setenv("TAGC_OPS", "reference")
    assert get_ops("cpu") is REFERENCE
    assert get_ops("cpu", "cpu") is CPU
    with pytest.raises(ValueError, match="unknown implementation 'numba'; choose from auto, "):
        get_ops("cpu", "numba")
    with pytest.raises(ValueError, match="'cpu' does not run on cuda"):
        get_ops("cuda", "cpu")

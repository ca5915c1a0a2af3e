"""The emulator names planted errors, and only those."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

from device import faulty
from device.ptx.faults import MisalignedError, OutOfBoundsError, RaceError, UninitializedError
from device.ptx.launch import emulated

# What the emulator says of each.
NAMED = {
    "mask": (
        OutOfBoundsError,
        r"faulty\.py:\d+: 16 bytes at byte \d+ of tensor 'x', which has 4000",
    ),
    "grid": (AssertionError, "wrong results"),
    "barrier": (
        RaceError,
        r"ld\.global\S* of tensor 'out' races with st\.global.* without a barrier",
    ),
    "shift": (AssertionError, "wrong results"),
    "programs": (RaceError, r"tensor 'x' races with .* by another program"),
    "alignment": (MisalignedError, r"faulty\.py:\d+: 16 bytes at byte 12 of tensor 'x'"),
}


@pytest.mark.parametrize("name", faulty.CORRECT)
def test_finds_nothing_where_nothing_is_wrong(emulation, name):
    with emulation() as done:
        faulty.CORRECT[name]()
    assert sum(done.launches.values()) == 1


@pytest.mark.parametrize("name", faulty.FAULTS)
def test_names_the_error(name):
    kind, message = NAMED[name]
    with emulated(), pytest.raises(kind, match=message) as found:
        faulty.FAULTS[name](True)
    assert type(found.value) is kind


def without(pattern: str):
    """A change of PTX: its first instruction that matches is gone."""

    def change(ptx: str) -> str:
        changed, count = re.subn(rf"^\t+[^\n]*\b{pattern}[^\n]*;$", "", ptx, count=1, flags=re.M)
        assert count == 1, pattern
        return changed

    return change


def test_names_a_barrier_that_the_compiler_dropped():
    with (
        emulated(change=without(r"bar\.sync")),
        pytest.raises(RaceError, match=r"shared memory races with .* without a barrier"),
    ):
        faulty.total()


def test_names_a_store_to_shared_memory_that_the_compiler_dropped():
    with (
        emulated(change=without(r"st\.shared")),
        pytest.raises(UninitializedError, match="nobody wrote"),
    ):
        faulty.total()


def test_a_dropped_store_leaves_the_output_unwritten():
    with emulated(change=without(r"st\.global")), pytest.raises(AssertionError, match="wrong"):
        faulty.CORRECT["shift"]()


def test_unwritten_registers_hold_garbage():
    with emulated(change=without(r"redux\S*|add\.s32")), pytest.raises(AssertionError):
        faulty.total()

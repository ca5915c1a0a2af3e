"""Alarms of a GPU go off in the same step on all ranks, whatever the devices have done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tagc.collect import lockstep
from tagc.collect.lockstep import LAG, Alarm


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


def gpu(done: bool) -> Any:
    """torch with a GPU that is done with everything at once, or only when it is waited for."""

    class Event:
        def __init__(self) -> None:
            self.known = False

        def record(self, stream: torch.device) -> None:
            self.known = done

        def query(self) -> bool:
            return self.known

        def synchronize(self) -> None:
            self.known = True

    def zeros(size: tuple[()], *, dtype: torch.dtype, **_: Any) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    return SimpleNamespace(
        zeros=zeros,
        cuda=SimpleNamespace(Event=Event, current_stream=lambda device: device),
        **{name: getattr(torch, name) for name in ("bool", "nan", "inference_mode")},
    )


def raised_at(done: bool, wrong_at: int, steps: int = 12) -> list[int]:
    """Steps in which a rank raises, if the condition is true in one of them."""
    found = []
    with patch.object(lockstep, "torch", gpu(done)):
        tested = Alarm("wrong")
        for step in range(steps):
            try:
                tested.check()
            except RuntimeError:
                found.append(step)
            floats = torch.ones(3)
            tested.note(torch.tensor(step == wrong_at).as_subclass(OnGpu), floats)
            assert bool(floats.isnan().all()) == (step == wrong_at)
    return found


@pytest.mark.parametrize("wrong_at", [-1, 0, 1, 5])
def test_ranks_raise_in_the_same_steps(wrong_at: int) -> None:
    fast, slow = (raised_at(done, wrong_at) for done in (True, False))
    raised = range(wrong_at + LAG + 1, 12) if wrong_at >= 0 else ()
    assert fast == slow == list(raised)


@pytest.mark.parametrize("before", [1, LAG + 3])
def test_what_was_put_right_is_forgotten(before: int) -> None:
    with patch.object(lockstep, "torch", gpu(True)):
        tested = Alarm("wrong")
        for wrong in [True] * before:
            tested.note(torch.tensor(wrong).as_subclass(OnGpu), torch.ones(1))
        tested.reset()
        for _ in range(2 * LAG + 2):
            tested.note(torch.tensor(False).as_subclass(OnGpu), torch.ones(1))
            tested.check()


def test_a_cpu_raises_at_once() -> None:
    with pytest.raises(RuntimeError, match="wrong"):
        Alarm("wrong").note(torch.tensor(True), torch.ones(1))

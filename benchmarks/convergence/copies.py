"""Parameters as simulated ranks gather them: by the library's own codecs, from messages about every
shard, or by adding changes to a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tagc.codecs.workspace import Workspace
from tagc.comm import GatherSetup, HostCopy
from tagc.ops import get_ops
from tagc.plan import UnitPlan, build_plan
from tagc.policy import Policy

from .units import Slots, units_of


class SimulatedCopies:
    """What all ranks compute with, while the model has what their optimizers have.

    Attributes:
        bits, elements: of the messages about one shard, for what the policy compresses.
    """

    def __init__(self, model: nn.Module, policy: Policy, ranks: int, dtype: torch.dtype) -> None:
        """Copies of the parameters as they are now.

        Args:
            dtype: that parameters are gathered in.
        """
        units = units_of(model, ranks)
        infos = [replace(unit.info, dtype=dtype) for unit in units]
        plans = build_plan(infos, policy, gathers=infos).parameters
        self._units = [
            _Unit(plan, unit.slots) for plan, unit in zip(plans, units, strict=bool(plans))
        ]
        segments = [s for plan in plans for s in plan.compressed]
        self.bits = 32 * sum(s.codec.words for s in segments)
        self.elements = sum(s.columns for s in segments)
        self._due = False

    def note_step(self) -> None:
        """The optimizer has changed the model's parameters."""
        self._due = True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the copies, which learn first what a step has changed."""
        for unit in self._units:
            unit.swap(learns=self._due)
        self._due = False
        try:
            yield
        finally:
            for unit in self._units:
                unit.swap_back()


class _Unit:
    def __init__(self, plan: UnitPlan, slots: Slots) -> None:
        device = slots.device
        ops = get_ops(device, "triton" if device.type == "cuda" else None)
        self._slots = slots
        setup = GatherSetup(plan=plan, ops=ops, device=device, workspace=Workspace(device))
        self._copy = HostCopy(setup, own=0)
        self._messages = torch.empty(plan.peers, plan.words, dtype=torch.int32, device=device)
        self._copy.rows.copy_(slots.weights())
        self._exact: list[Tensor] = []

    def swap(self, *, learns: bool) -> None:
        copy = self._copy
        if learns:
            shards = self._slots.weights().to(copy.rows.dtype)
            for own, shard in enumerate(shards):
                copy.encode(shard, self._messages[own : own + 1], own)
            copy.decode(self._messages, copy.rows)
        self._exact = self._slots.replace_weights(copy.rows)

    def swap_back(self) -> None:
        self._slots.restore_weights(self._exact)

"""A unit's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.codecs.state import MAX_COUNT

# The order in checkpoints.
_COUNTS = (
    "steps",
    "compressed_steps",
    "earlier_steps",
    "native_bytes",
    "message_bytes",
    "other_bytes",
)


@dataclass
class Counters:
    """Counts one unit's reductions and bytes.

    Attributes:
        steps: reductions so far.
        compressed_steps: reductions that sent messages.
        earlier_steps: reductions of an earlier run with another layout, which this run continues.
            They count for the warm-up, but not in the metrics.
        native_bytes, message_bytes, other_bytes: bytes sent so far in dense collectives, in
            messages, and in the codecs' other exchanges; if ranks of a host add up first, only
            those to other hosts.
        inside_bytes: bytes sent so far to ranks of the same host.
        on_hosts: whether ranks of a host add up first.
    """

    steps: int = 0
    compressed_steps: int = 0
    earlier_steps: int = 0
    native_bytes: int = 0
    message_bytes: int = 0
    other_bytes: int = 0
    inside_bytes: int = 0
    on_hosts: bool = False

    @property
    def all_steps(self) -> int:
        """Reductions, including those of the earlier run."""
        return self.earlier_steps + self.steps

    @property
    def sent_bytes(self) -> int:
        """All bytes except those inside hosts."""
        return self.native_bytes + self.message_bytes + self.other_bytes

    def add(self, sent: Mapping[tuple[str, str], int]) -> None:
        """Count the bytes of a program, by level and flight."""
        for (level, flight), size in sent.items():
            if level == "inside":
                self.inside_bytes += size
            elif flight == "sums":
                self.native_bytes += size
            elif flight in ("messages", "sums_of_slices"):
                self.message_bytes += size
            else:
                self.other_bytes += size

    def state(self) -> dict[str, Tensor]:
        counts = [getattr(self, name) for name in _COUNTS]
        found = {"counters": torch.tensor(counts, dtype=torch.int64, device="cpu")}
        if self.on_hosts:
            inside = torch.tensor(self.inside_bytes, dtype=torch.int64, device="cpu")
            found["inside_bytes"] = inside
        return found

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        counters = state["counters"]
        if bool(((counters < 0) | (counters > MAX_COUNT)).any()):
            raise ValueError("a counter is negative, or larger than any run is long")
        if self.on_hosts and not 0 <= int(state["inside_bytes"]) <= MAX_COUNT:
            raise ValueError("the count of bytes inside hosts is negative, or too large")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, value in zip(_COUNTS, state["counters"].tolist(), strict=True):
            setattr(self, name, value)
        if self.on_hosts:
            self.inside_bytes = int(state["inside_bytes"])

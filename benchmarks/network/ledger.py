"""Every collective that a step starts: how often, how many bytes, how long the step waits for it.

The functions of ``torch.distributed`` are replaced by ones that count and call them, so that FSDP1,
FSDP2 and tagc are measured alike.

Payload bytes are what a rank must send to others, headers and a backend's waste left out. Seconds
are those that the calling thread spends in the call and in ``wait()``: time that communication adds
to the step, waiting for slower ranks included.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tagc.collect import UnitGatherer
from tagc.collect.transport import HEADER_TAG

PARAMETERS, GRADIENTS, OTHER = "parameters", "gradients", "other"

# Some names are new in torch 2.13, some deprecated there.
_KINDS = {
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce": "all_reduce",
    "isend": "send",
    "irecv": "receive",
}
# Their first argument is what they send, of the others the second.
_IN_PLACE = ("all_reduce", "send", "receive")


@dataclass
class Tally:
    """Sums since the last :func:`reset`; ``payload`` is by direction, ``counts`` by collective."""

    seconds: float = 0.0
    payload: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


_tally = Tally()
_direction: str | None = None


def install() -> None:
    """Replace the collectives of ``torch.distributed`` in this process."""
    for name in _KINDS.keys() & vars(dist).keys():
        counted = _counted(getattr(dist, name), _KINDS[name])
        setattr(dist, name, counted)
        if name in ("isend", "irecv"):  # `batch_isend_irecv` compares its operations with these
            setattr(distributed_c10d, name, counted)
    # tagc gathers parameters by messages, which nothing else tells from gradients.
    UnitGatherer.gather = direction(PARAMETERS)(UnitGatherer.gather)


def tally(*, reset: bool = False) -> Tally:
    """The tally that counts now, or one that counts from here."""
    global _tally
    if reset:
        _tally = Tally()
    return _tally


@contextlib.contextmanager
def direction(name: str) -> Iterator[None]:
    """Count what starts inside as traffic of ``name``.

    Elsewhere an all-gather is parameters and everything else gradients.
    """
    global _direction
    before, _direction = _direction, name
    try:
        yield
    finally:
        _direction = before


def payload_bytes(kind: str, sent: Tensor, world_size: int) -> int:
    """Bytes that a rank must send to others for a collective whose input is ``sent``."""
    others = sent.nbytes * (world_size - 1)
    sizes = {"receive": 0, "send": sent.nbytes, "all_gather": others}
    sizes["all_reduce"] = 2 * others // world_size
    return sizes.get(kind, others // world_size)  # a reduce-scatter, or an all-to-all


class _TimedWork(dist.Work):
    """A work whose ``wait`` is counted. A subclass, since FSDP asks for the type."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        start = time.perf_counter()
        try:
            return self._work.wait(*args, **kwargs)
        finally:
            _tally.seconds += time.perf_counter() - start

    def get_future(self) -> Any:
        """DDP's hooks wait for it; those seconds are not counted."""
        return self._work.get_future()


def _counted(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        sent = list(arguments.values())[0 if kind in _IN_PLACE else 1]
        ranks = dist.get_world_size(arguments.get("group"))
        size = payload_bytes(kind, sent, ranks)
        if arguments.get("tag") == HEADER_TAG:
            size = 0  # beside what has to be sent; the kernel counts it
        toward = _direction or (PARAMETERS if kind == "all_gather" else GRADIENTS)
        _tally.payload[toward] = _tally.payload.get(toward, 0) + size
        _tally.counts[kind] = _tally.counts.get(kind, 0) + 1
        start = time.perf_counter()
        work = original(*args, **kwargs)
        _tally.seconds += time.perf_counter() - start
        return work if work is None else _TimedWork(work)

    return counted

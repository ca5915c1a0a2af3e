"""Measures codecs on this device, in seconds per element."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from tagc.codecs import CodecPlan, kind_of
from tagc.codecs.sample import ROWS, Sample, Step
from tagc.costs.codec_time import Speed, speed_key
from tagc.ops import Ops

# Elements of all rows. A GPU needs more, so that the ends of kernels do not count.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
_REPEATS = 5
# Cycles for which a GPU waits while the host queues all repeats: some 5 ms.
_HELD_BACK = 10_000_000


def measure_speeds(
    codecs: Iterable[CodecPlan],
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    *,
    repeats: int = _REPEATS,
) -> dict[str, Speed]:
    """Measure every codec on gradients (or parameters) of ``dtype``.

    Returns:
        Speeds by :func:`speed_key`.
    """
    speeds: dict[str, Speed] = {}
    for codec in codecs:
        key = speed_key(codec)
        if key not in speeds:
            speeds[key] = _measure(codec, ops, device, dtype, repeats)
    return speeds


def _measure(
    codec: CodecPlan, ops: Ops, device: torch.device, dtype: torch.dtype, repeats: int
) -> Speed:
    numel = _ELEMENTS.get(device.type, _ELEMENTS["cuda"])
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (ROWS, numel // ROWS)
    wide = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
    grad = wide.to(dtype)
    stored = codec.feedback
    residual = None if stored is None else torch.zeros_like(grad, dtype=stored.dtype)
    average = 0.0 if stored is None else stored.old_share
    encode, decode = kind_of(codec).sample(codec, Sample(ops, grad, residual, average))
    decoded = numel // ROWS if codec.cells else numel

    def restore() -> None:
        # Without this the residual would grow with every call, and select more than ever fits.
        if residual is not None:
            residual.zero_()

    return Speed(
        encode=_seconds(encode, restore, device, repeats) / numel,
        decode=_seconds(decode, restore, device, repeats) / decoded,
    )


def _seconds(run: Step, before: Step, device: torch.device, repeats: int) -> float:
    before()
    run()  # the first call compiles, or warms up
    timed = _on_cpu(run, before, repeats)
    if device.type == "cuda":
        with torch.cuda.device(device):
            timed = _on_gpu(run, before, repeats)
    return min(timed)  # other load on the machine only adds time


def _on_cpu(run: Step, before: Step, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        run()
        yield time.perf_counter() - start


def _on_gpu(run: Step, before: Step, repeats: int) -> list[float]:
    """Seconds of the kernels alone. In a step the host launches them ahead of the device; here they
    queue up behind a wait, so that events between them do not wait for the host."""
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in ("start", "end")] for _ in range(repeats)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(_HELD_BACK)
    for start, end in events:
        before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in events]

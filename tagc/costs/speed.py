"""Measures codecs on this device, in seconds per element."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from tagc.codecs import CodecPlan, kind_of
from tagc.codecs.sample import ROWS, Sample, Step
from tagc.costs.codec_time import Speed, speed_key
from tagc.ops import Ops

# Elements of all rows. A GPU needs more, to make launch time negligible.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
_REPEATS = 5


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
    residual = None if stored is None else torch.zeros_like(grad, dtype=stored.working_dtype)
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
    taken = []
    for i in range(repeats + 1):
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:  # the first call compiles, or warms up
            taken.append(time.perf_counter() - start)
    return min(taken)  # other load on the machine only adds time

"""Parses bandwidths, times and counts as users write them on a command line."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
# The smallest and the largest value: others are typing errors, and would overflow somewhere.
_RANGES = {
    "a bandwidth": (1e-3, 1e18),  # bytes/s
    "a memory": (0.0, 1e18),  # bytes
    "a time": (0.0, 1e9),  # seconds, 30 years
    "a number of things": (1.0, 1e15),
    "a number of ranks": (1.0, 1e7),
    "a number": (1e-9, 1e9),
}


def bandwidth(text: str) -> float:
    """Bytes/s of '10Gbit', '10Gbit/s', '10Gbps' or '1.25GB/s'."""
    example = "a bandwidth: write a number and a unit, such as 10Gbit, 200Mbit or 1.25GB (bytes)"
    value, prefix, unit = _split(text, r"([kKMGT]?)(bit|bps|B)(?:/s)?", example)
    value *= _PREFIX[prefix.lower()] / (1 if unit == "B" else 8)
    return _positive(value, text, "a bandwidth")


def memory(text: str) -> float:
    """Bytes of '80GB' or '16GiB'."""
    example = "a memory size: write a number and a unit, such as 80GB or 16GiB"
    value, prefix, binary = _split(text, r"([kKMGT]?)(i?)B", example)
    factor = _PREFIX[prefix.lower()]
    if binary:
        factor = 1024.0 ** round(math.log10(factor) / 3)
    return _positive(value * factor, text, "a memory")


def seconds(text: str) -> float:
    """Seconds of '50us', '1.2s' or '3ms'."""
    example = "a time: write a number and a unit, such as 50us, 3ms or 1.2s"
    value, unit = _split(text, r"(ns|us|µs|ms|s)", example)
    return value and _positive(value * _SECONDS[unit], text, "a time")


def ranks(text: str) -> int:
    """A number of ranks or of micro-batches: '64' or '1k'."""
    return count(text, "a number of ranks")


def count(text: str, what: str = "a number of things") -> int:
    """A number of things: '64', '7e9', '7B' or '1.3m'."""
    value, prefix = _split(text, r"([kKmMgGbBtT]?)", "a number, such as 64, 7e9 or 125M")
    prefix = prefix.lower().replace("b", "g")  # billions
    return int(_positive(value * _PREFIX[prefix], text, what))


def number(text: str) -> float:
    """A positive number."""
    (value,) = _split(text, "", "a number above zero")
    return _positive(value, text, "a number")


def share(text: str) -> float:
    """A number in [0, 1]."""
    what = "a share: write a number from 0 to 1"
    (value,) = _split(text, "", what)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not {what}")
    return value


def _split(text: str, units: str, what: str) -> tuple[Any, ...]:
    """The number in front, and what follows it."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*" + units, text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not {what}")
    return float(found[1]), *found.groups()[1:]


def _positive(value: float, text: str, what: str) -> float:
    least, most = _RANGES[what]
    if not value > 0 or value < least:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not {what} above zero")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is more than {what} can be, {most:.0e}")
    return value


def format_seconds(value: float) -> str:
    """Seconds as text, with a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs" if value else "0 s"


def format_bandwidth(value: float) -> str:
    """Bytes/s as text in bits/s, with a unit."""
    bits = 8 * value
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if bits >= 0.9995 * scale:
            return f"{bits / scale:.3g} {unit}bit/s"
    return f"{bits / 1e3:.3g} kbit/s"

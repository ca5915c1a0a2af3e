"""Parses bandwidths, times and counts as users write them on a command line."""

from __future__ import annotations

import argparse
import math
import re

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
# Larger values are typing errors, and would overflow somewhere.
_MOST = {
    "a bandwidth": 1e18,  # bytes/s
    "a memory": 1e18,  # bytes
    "a time": 1e9,  # seconds, 30 years
    "a number of things": 1e15,
    "a number of ranks": 1e7,
    "a number": 1e9,
}
_LEAST = {
    "a number of things": 1.0,
    "a number of ranks": 1.0,
    "a bandwidth": 1e-3,
    "a number": 1e-9,
}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"


def bandwidth(text: str) -> float:
    """Bytes/s of '10Gbit', '10Gbit/s', '10Gbps' or '1.25GB/s'."""
    found = re.fullmatch(_NUMBER + r"([kKMGT]?)(bit|bps|B)(?:/s)?", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a bandwidth: write a number and a unit, such as 10Gbit, "
            "200Mbit or 1.25GB (bytes)"
        )
    number, prefix, unit = found.groups()
    value = float(number) * _PREFIX[prefix.lower()] / (1 if unit == "B" else 8)
    return _positive(value, text, "a bandwidth")


def memory(text: str) -> float:
    """Bytes of '80GB' or '16GiB'."""
    found = re.fullmatch(_NUMBER + r"([kKMGT]?)(i?)B", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a memory size: write a number and a unit, such as 80GB or 16GiB"
        )
    prefix = _PREFIX[found[2].lower()]
    if found[3]:
        prefix = 1024.0 ** round(math.log10(prefix) / 3)
    return _positive(float(found[1]) * prefix, text, "a memory")


def seconds(text: str) -> float:
    """Seconds of '50us', '1.2s' or '3ms'."""
    found = re.fullmatch(_NUMBER + r"(ns|us|µs|ms|s)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a time: write a number and a unit, such as 50us, 3ms or 1.2s"
        )
    value = float(found[1]) * _SECONDS[found[2]]
    return value and _positive(value, text, "a time")


def ranks(text: str) -> int:
    """A number of ranks or of micro-batches: '64' or '1k'."""
    return count(text, "a number of ranks")


def count(text: str, what: str = "a number of things") -> int:
    """A number of things: '64', '7e9', '7B' or '1.3m'."""
    found = re.fullmatch(_NUMBER + r"([kKmMgGbBtT]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number, such as 64, 7e9 or 125M")
    prefix = found[2].lower().replace("b", "g")  # billions
    return int(_positive(float(found[1]) * _PREFIX[prefix], text, what))


def number(text: str) -> float:
    """A positive number."""
    try:
        return _positive(float(text), text, "a number")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number") from None


def share(text: str) -> float:
    """A number in [0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a share: write a number from 0 to 1")
    return value


def _positive(value: float, text: str, what: str) -> float:
    if not value > 0 or value < _LEAST.get(what, 0):
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not {what} above zero")
    if value > _MOST[what]:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is more than {what} can be, {_MOST[what]:.0e}"
        )
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

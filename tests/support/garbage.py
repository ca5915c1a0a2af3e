"""Garbage collection in processes that run tests."""

import atexit
import gc


def collect_seldom() -> None:
    """Leave what was imported so far out of garbage collections, and make them rarer: they took
    about a fifth of the time of tests on ranks."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    # Libraries that count what is left at the end would call it a leak.
    atexit.register(gc.unfreeze)

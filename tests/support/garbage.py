"""Garbage collection in processes that run tests."""

import atexit
import gc


def collect_seldom() -> None:
    """Exclude imported objects from garbage collections, and make them rarer: they took about a
    fifth of the time of tests on ranks."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    # Otherwise libraries that count leftover objects at the end report a leak.
    atexit.register(gc.unfreeze)

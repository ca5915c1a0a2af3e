"""Benchmarks: ratios measured side by side in one run. ``python -m benchmarks --help``.

Installed as ``tagc.benchmarks`` for ``tagc bench``, so modules import each other relatively.
"""

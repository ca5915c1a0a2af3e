"""Packages that only one integration needs."""

from __future__ import annotations


def missing(package: str, error: ImportError) -> ImportError:
    """What to raise where an optional import failed: with the command that installs the package, or
    the error itself if the package is there and broken."""
    if error.name is None or error.name.partition(".")[0] != package:
        return error
    return ModuleNotFoundError(
        f"tagc.integrations needs {package}, which is not installed here: pip install {package}",
        name=package,
    )

"""The error for a missing package that only one integration needs."""

from __future__ import annotations


def missing(package: str, error: ImportError) -> ImportError:
    """The error to raise after an optional import failed. It names the command that installs the
    package; if the package is installed but broken, it is ``error`` itself."""
    if error.name is None or error.name.partition(".")[0] != package:
        return error
    return ModuleNotFoundError(
        f"tagc.integrations needs {package}, which is not installed here: pip install {package}",
        name=package,
    )

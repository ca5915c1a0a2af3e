"""Docstrings for the site: cross-references as Sphinx spells them become code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object  # pyright: ignore[reportMissingImports]


class Roles(Extension):
    """``:meth:`Unit.install``` is shown as `Unit.install`."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for everything that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", obj.docstring.value)

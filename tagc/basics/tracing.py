"""Functions that ``torch.compile`` leaves out of what it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """``function``, which runs as it is where a compiler traces its caller. This loads the
    compiler, so don't decorate what an import defines."""
    left_out: Any = torch.compiler.disable(function)
    return left_out

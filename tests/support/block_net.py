"""The model of `parity`, sharded by blocks."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import tagc
from parity.fsdp2_options import by_block
from parity.model import Net

WEIGHTS = {
    "schema": 1,
    "gradients": [
        {"when": {"name": "*.weight"}, "codec": {"kind": "quantized", "bits": 4, "block": 32}}
    ],
}


def net(**how: Any) -> Any:
    torch.manual_seed(1)
    return Net(**how)


def sharded(model: Any, **options: Any) -> Any:
    by_block(model, **options)
    return model


def wrap(model: Any, policy: Any = WEIGHTS, **how: Any) -> Any:
    with warnings.catch_warnings():
        # Units as small as these may well cost more compressed.
        warnings.simplefilter("ignore")
        return tagc.wrap(model, policy, **how)

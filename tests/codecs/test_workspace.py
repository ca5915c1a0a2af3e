"""Scratch buffers: training writes to what an evaluation took."""

from __future__ import annotations

import torch

from tagc.codecs.workspace import Workspace


def test_training_writes_to_what_an_evaluation_took() -> None:
    workspace = Workspace(torch.device("cpu"))
    with torch.inference_mode():
        workspace.take("name", (4,), torch.float32).zero_()
    view = workspace.take("name", (4,), torch.float32)
    view.copy_(torch.ones(4, requires_grad=True))
    assert view.sum() == 4

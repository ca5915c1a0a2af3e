"""Scratch buffers: steps take the same views, and nothing keeps a buffer that was outgrown."""

from __future__ import annotations

import torch

from tagc.codecs.workspace import Workspace

CPU = torch.device("cpu")


def test_the_same_view_again() -> None:
    workspace = Workspace(CPU)
    view = workspace.take("name", (2, 3), torch.int32)
    assert workspace.take("name", (2, 3), torch.int32) is view
    other = workspace.take("name", (3, 2), torch.int32)
    assert other.shape == (3, 2)
    assert other.data_ptr() == view.data_ptr()
    assert workspace.take("other", (2, 3), torch.int32).data_ptr() != view.data_ptr()
    assert workspace.take("name", (2, 3), torch.float32).dtype == torch.float32


def test_training_writes_to_what_an_evaluation_took() -> None:
    workspace = Workspace(CPU)
    with torch.inference_mode():
        workspace.take("name", (4,), torch.float32).zero_()
    view = workspace.take("name", (4,), torch.float32)
    view.copy_(torch.ones(4, requires_grad=True))
    assert view.sum() == 4

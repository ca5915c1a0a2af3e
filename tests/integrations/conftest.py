"""What all tests of integrations share."""

from __future__ import annotations

import pytest

from support.trainers import Calls
from tagc.integrations import accelerate, residuals, torchtitan


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Installed where integrations look: no model is wrapped, nothing is written."""
    noted = Calls()
    monkeypatch.setattr("tagc.handle.wrapper.wrap", noted.add("wrap"))
    for module in (accelerate, torchtitan):
        name = "wrap_model" if module is accelerate else "wrap"
        monkeypatch.setattr(module, name, noted.add("wrap"))
    for place in (residuals, accelerate):
        monkeypatch.setattr(place, "save_residuals", noted.add("save"))
        monkeypatch.setattr(place, "load_residuals", noted.add("load", True))
    return noted

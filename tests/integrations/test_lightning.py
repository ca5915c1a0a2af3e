"""Lightning's strategies, with stand-ins for Lightning; `tests/test_recipes.py` has itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from support.trainers import HERE, Calls, Handle, imported, module
from tagc.handle.compressor import attach
from tagc.integrations import residuals


class ParallelStrategy:
    """Lightning's strategies, of both kinds, as far as they are used."""

    is_global_zero = True

    def __init__(self, parallelize_fn: Any = None, *, save_distributed_checkpoint: bool = True):
        self.model: Any = nn.Module()
        self.parallelize_fn = parallelize_fn
        self._save_distributed_checkpoint = save_distributed_checkpoint

    def broadcast(self, path: Any) -> Any:
        return path

    def setup(self, trainer: Any) -> None:
        pass

    def setup_module(self, module: Any) -> Any:
        return self.parallelize_fn(module, "mesh")

    def save_checkpoint(self, *args: Any) -> None:
        args[0].pop("optimizer_states", None) if isinstance(args[0], dict) else None

    def load_checkpoint(self, path: Any, state: Any = None) -> dict:
        return {"left": 1}

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


class ModelParallelStrategy(ParallelStrategy):
    pass


class DDPStrategy(ParallelStrategy):
    def __init__(self) -> None:
        super().__init__(lambda model, mesh: model)
        del self._save_distributed_checkpoint


def strategies(monkeypatch: pytest.MonkeyPatch, name: str, calls: Calls) -> Any:
    stand_in = module(ModelParallelStrategy=ModelParallelStrategy, DDPStrategy=DDPStrategy)
    base = module(ParallelStrategy=ParallelStrategy)
    states = module(TrainerFn=SimpleNamespace(FITTING="fit"))
    sharded = {
        "lightning__fabric__strategies": stand_in,
        "lightning__fabric__strategies__parallel": base,
        "lightning__pytorch__strategies": stand_in,
        "lightning__pytorch__strategies__parallel": base,
        "lightning__pytorch__trainer__states": states,
    }
    parents = (
        "lightning",
        *(f"lightning__{of}" for of in ("fabric", "pytorch", "pytorch__trainer")),
    )
    made = imported(monkeypatch, name, **dict.fromkeys(parents, module()), **sharded)
    monkeypatch.setattr(residuals, "attached", lambda model: model if calls else None)
    return made


def test_fabrics_strategy(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    made = strategies(monkeypatch, "fabric", calls).TagcStrategy
    model = nn.Module()
    its = made(lambda model, mesh: model, policy="hybrid", tagc_options={"hosts": None})
    assert its.setup_module(model) is model
    its.save_checkpoint(tmp_path, {"model": model, "step": 3})
    assert its.load_checkpoint(tmp_path, {"model": model}) == {"left": 1}
    folder = tmp_path / "tagc" / "model"
    assert calls == [("wrap", "hybrid", {"hosts": None}), ("save", folder), ("load", folder)]
    its.load_checkpoint(tmp_path, model)  # weights alone, of a model that is not wrapped
    handle: Any = Handle()
    attach(model, handle)
    its.load_checkpoint(tmp_path, model)
    assert handle.asked == [("refresh",)]
    assert len(calls) == 3


def test_lightnings_strategy(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    made = strategies(monkeypatch, "lightning", calls).TagcStrategy
    its = made(policy="hybrid", save_distributed_checkpoint=False)
    its.setup(SimpleNamespace(state=SimpleNamespace(fn="validate")))
    assert calls == []
    its.setup(SimpleNamespace(state=SimpleNamespace(fn="fit")))
    file, folder = tmp_path / "last.ckpt", tmp_path / "last.ckpt.tagc" / "model"
    its.save_checkpoint({"state_dict": {}, "optimizer_states": []}, file)
    its.save_checkpoint({"state_dict": {}}, file)  # weights alone
    its.load_checkpoint(file)
    assert calls == [("wrap", "hybrid"), ("save", folder), ("load", folder)]
    folder.mkdir(parents=True)
    its.remove_checkpoint(file)
    assert not folder.parent.exists()
    assert residuals.residual_folder(file, distributed=True) == file / "tagc"


def test_lightnings_strategies_for_ddp(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path
) -> None:
    fabrics = strategies(monkeypatch, "fabric", calls).TagcDDPStrategy(policy="hybrid")
    model = nn.Module()
    assert fabrics.setup_module(model) is model
    fabrics.save_checkpoint(tmp_path / "step", {"model": model})
    assert calls == [("wrap", "hybrid"), ("save", tmp_path / "step.tagc" / "model")]

    its = strategies(monkeypatch, "lightning", calls).TagcDDPStrategy(policy="hybrid")
    assert its.restore_checkpoint_after_setup
    with pytest.raises(RuntimeError, match=r"Trainer\.fit wraps it"):
        its.compressor  # noqa: B018
    handles: list[Any] = [Handle(), Handle()]

    def wrap(model: nn.Module, policy: Any) -> nn.Module:
        attach(model, handles[len(made)])
        made.append(model)
        return model

    made: list[nn.Module] = []
    monkeypatch.setattr(sys.modules[HERE + "lightning"], "wrap", wrap)
    for _ in range(2):
        its.model = nn.Module()  # every `fit` makes DDP anew
        its.setup(SimpleNamespace(state=SimpleNamespace(fn="fit")))
        its.model = nn.Module()  # and takes it off at its end
    assert its.compressor is handles[1]
    assert handles[0].asked == [("state_dict",)]
    assert handles[1].asked == [("load_state_dict", None)]
    its.save_checkpoint({"optimizer_states": []}, tmp_path / "last.ckpt")
    assert calls[2:] == [("save", tmp_path / "last.ckpt.tagc" / "model")]

"""The integrations with stand-ins for the trainers; `tests/test_recipes.py` has the trainers."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.states import POLICIES, run, shared_folder, wrapped
from tagc.handle.compressor import attach
from tagc.integrations import accelerate, residuals, torchtitan
from tagc.integrations.sharded import residual_folder

HERE = "tagc.integrations."


class Calls(list):
    """What was wrapped, saved and loaded, in order."""

    def add(self, name: str, result: Any = None) -> Any:
        def note(model: Any, what: Any = None, *args: Any, **options: Any) -> Any:
            what = what() if name == "load" else what  # which says where from
            self.append((name, what, options) if options else (name, what))
            return model if result is None else result

        return note


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


def imported(monkeypatch: pytest.MonkeyPatch, name: str, **others: ModuleType | None) -> Any:
    """An integration, imported anew with stand-ins for other packages; None is not installed."""
    for other, module in others.items():
        monkeypatch.setitem(sys.modules, other.replace("__", "."), module)  # type: ignore[arg-type]
    for module in ("sharded", name):
        monkeypatch.delitem(sys.modules, HERE + module, raising=False)
    return importlib.import_module(HERE + name)


def module(**names: Any) -> Any:
    made = ModuleType("stand-in")
    vars(made).update(names)
    return made


@pytest.mark.parametrize(
    ("name", "package"),
    [("transformers", "transformers"), ("fabric", "lightning"), ("lightning", "lightning")],
)
def test_what_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    loaded = [key for key in sys.modules if key == package or key.startswith(f"{package}.")]
    for key in loaded:
        monkeypatch.delitem(sys.modules, key)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        imported(monkeypatch, name, **{package: None})


# transformers


class Trainer:
    """Of transformers, as its callbacks see it."""

    def __init__(self, callback: Any, output_dir: Path, *, state: Any = None, **args: Any) -> None:
        self.callback = callback
        about = {"save_only_model": False, "resume_from_checkpoint": None, "save_strategy": "steps"}
        self.args = SimpleNamespace(**{"output_dir": str(output_dir), **about, **args})
        self.state = state or SimpleNamespace(global_step=0, stateful_callbacks={})
        vars(self.state).setdefault("trial_name", None)
        vars(self.state).setdefault("trial_params", None)
        self.model = nn.Module()

    def call(self, event: str) -> None:
        getattr(self.callback, event)(self.args, self.state, None, model=self.model)


@pytest.fixture
def callback(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in = module(TrainerCallback=object)
    return imported(monkeypatch, "transformers", transformers=stand_in).TagcCallback


def test_the_callback_wraps_saves_and_loads(callback: Any, calls: Calls, tmp_path: Path) -> None:
    trainer = Trainer(callback("hybrid", hosts=None), tmp_path)
    trainer.call("on_train_begin")
    assert calls == [("wrap", "hybrid", {"hosts": None})]
    trainer.state.global_step = 5
    trainer.call("on_save")
    saved = tmp_path / "checkpoint-5" / "tagc"
    assert calls[1:] == [("save", saved)]
    saved.mkdir(parents=True)

    # Resumed with another output folder: the checkpoint says where it was saved.
    again = Trainer(callback(), tmp_path / "other", state=trainer.state)
    again.call("on_train_begin")
    assert calls[2:] == [("wrap", None), ("load", saved)]
    trainer.args.save_only_model = True
    trainer.call("on_save")
    assert len(calls) == 4


def test_the_callback_looks_where_the_user_says(
    callback: Any, calls: Calls, tmp_path: Path
) -> None:
    state = SimpleNamespace(global_step=5, stateful_callbacks={"tagc": {"saved_to": "/gone"}})
    missing = Trainer(callback(), tmp_path, state=state)
    with pytest.raises(FileNotFoundError, match=r"/gone.* nor in .*resume_from=folder"):
        missing.call("on_train_begin")
    for name in ("moved", "given"):
        (tmp_path / name / "tagc").mkdir(parents=True)
    state.stateful_callbacks = {"tagc": {"saved_to": "/gone"}}
    moved = Trainer(callback(resume_from=tmp_path / "moved"), tmp_path, state=state)
    moved.call("on_train_begin")
    assert calls[-1] == ("load", tmp_path / "moved" / "tagc")
    state.stateful_callbacks = {"tagc": {"saved_to": "/gone"}}
    path = str(tmp_path / "given")
    Trainer(callback(), tmp_path, state=state, resume_from_checkpoint=path).call("on_train_begin")
    assert calls[-1] == ("load", tmp_path / "given" / "tagc")


def test_the_callback_goes_on_from_a_dense_checkpoint(
    callback: Any, calls: Calls, tmp_path: Path
) -> None:
    state = SimpleNamespace(global_step=5, stateful_callbacks={})
    Trainer(callback(), tmp_path, state=state).call("on_train_begin")
    # It is there that nothing is found, and that a warning says so.
    assert calls[-1] == ("load", tmp_path / "checkpoint-5" / "tagc")


def trial(**said: Any) -> Any:
    """The state in a hyperparameter search."""
    about = {"global_step": 0, "trial_name": None, "trial_params": {"learning_rate": 0.1}}
    return SimpleNamespace(stateful_callbacks={}, **{**about, **said})


def test_the_callback_follows_trials_of_a_search(
    callback: Any, calls: Calls, tmp_path: Path
) -> None:
    trainer = Trainer(callback(), tmp_path, state=trial(trial_name="run-0"))
    trainer.call("on_train_begin")
    trainer.state.global_step = 5
    trainer.call("on_save")
    saved = tmp_path / "run-0" / "checkpoint-5" / "tagc"
    assert calls[1:] == [("save", saved)]
    saved.mkdir(parents=True)
    # Resumed by itself, where the name is still in the state, and no longer a trial.
    trainer.state.trial_params = None
    trainer.call("on_train_begin")
    assert calls[-1] == ("load", saved)
    trainer.call("on_save")
    assert calls[-1] == ("save", tmp_path / "checkpoint-5" / "tagc")


def test_the_callback_refuses_trials_without_a_name(
    callback: Any, calls: Calls, tmp_path: Path
) -> None:
    trainer = Trainer(callback(), tmp_path, state=trial())
    with pytest.raises(ValueError, match=r"trial without a name.*hp_name=.*save_strategy=\"no\""):
        trainer.call("on_train_begin")
    assert calls == []
    for fine in ({"save_strategy": "no"}, {"save_only_model": True}):
        Trainer(callback(), tmp_path, state=trial(), **fine).call("on_train_begin")
    assert [name for name, *_ in calls] == ["wrap", "wrap"]


# Accelerate


def test_accelerates_hooks_save_and_load(calls: Calls) -> None:
    hooks: list[Any] = []
    accelerator = SimpleNamespace(
        register_save_state_pre_hook=hooks.append, register_load_state_pre_hook=hooks.append
    )
    model = nn.Module()
    assert accelerate.wrap(accelerator, model, "hybrid", folder="tagc_1") is model
    save, load = hooks
    save([model], [], "there")
    load([], "there")
    folder = Path("there/tagc_1")
    assert calls == [("wrap", "hybrid"), ("save", folder), ("load", folder)]


# Lightning


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
        "lightning__fabric",
        "lightning__pytorch",
        "lightning__pytorch__trainer",
    )
    made = imported(monkeypatch, name, **dict.fromkeys(parents, module()), **sharded)
    place = importlib.import_module(HERE + "sharded")
    monkeypatch.setattr(place, "attached", lambda model: model if calls else None)
    return made


def strategy(monkeypatch: pytest.MonkeyPatch, name: str, calls: Calls) -> Any:
    return strategies(monkeypatch, name, calls).TagcStrategy


def test_fabrics_strategy(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    made = strategy(monkeypatch, "fabric", calls)
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
    made = strategy(monkeypatch, "lightning", calls)
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
    assert residual_folder(file, distributed=True) == file / "tagc"


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


@pytest.mark.parametrize("name", ["fabric", "lightning"])
@pytest.mark.parametrize("distributed", [True, False])
def test_checkpoints_of_the_other_kind_are_loaded_and_removed(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path, name: str, distributed: bool
) -> None:
    made = strategy(monkeypatch, name, calls)
    calls.append("wrapped")
    path, model = tmp_path / "last.ckpt", nn.Module()
    path.mkdir() if distributed else path.touch()

    def new(distributed: bool) -> Any:
        its = made(lambda model, mesh: model, save_distributed_checkpoint=distributed)
        its.model = model
        return its

    parts = {"model": model}
    checkpoint = ({"optimizer_states": []}, path) if name == "lightning" else (path, parts)
    new(distributed).save_checkpoint(*checkpoint)
    other = new(not distributed)
    other.load_checkpoint(*([path] if name == "lightning" else [path, parts]))
    folder = residual_folder(path, distributed=distributed) / "model"
    assert calls[1:] == [("save", folder), ("load", folder)]
    if name == "lightning":
        folder.mkdir(parents=True)
        other.remove_checkpoint(path)
        assert not path.exists()
        assert not folder.parent.exists()


# torchtitan


def test_torchtitans_trainer(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtitan, "compressor", lambda model: ("compressor of", model))
    parts = [nn.Module(), nn.Module()]
    trainer = SimpleNamespace(model_parts=parts, checkpointer=SimpleNamespace(states={"model": 1}))
    assert torchtitan.compress(trainer, "hybrid") is trainer
    assert calls == [("wrap", "hybrid"), ("wrap", "hybrid")]
    expected = {"tagc": ("compressor of", parts[0]), "tagc_1": ("compressor of", parts[1])}
    assert trainer.checkpointer.states == {"model": 1, **expected}
    with pytest.raises(ValueError, match="already have 'tagc'"):
        torchtitan.compress(trainer)
    with pytest.raises(ValueError, match=r"needs model_parts.*Call tagc\.wrap"):
        torchtitan.compress(SimpleNamespace(model=nn.Module()))
    checkpointer = SimpleNamespace(enable=True)
    with pytest.raises(ValueError, match=r"needs model_parts.*Call tagc\.wrap"):
        torchtitan.compress(SimpleNamespace(model_parts=parts, checkpointer=checkpointer))


def test_torchtitans_trainer_without_checkpoints(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchtitan, "compressor", lambda model: ("compressor of", model))
    checkpointer = SimpleNamespace(enable=False)  # its __init__ returns before there are states
    trainer = SimpleNamespace(model_parts=[nn.Module()], checkpointer=checkpointer)
    assert torchtitan.compress(trainer, "hybrid") is trainer
    assert calls == [("wrap", "hybrid")]
    assert vars(checkpointer) == {"enable": False}


def test_torchtitans_graphs_are_refused(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtitan, "compressor", lambda model: ("compressor of", model))

    class OnGpu(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([SimpleNamespace(device=torch.device("cuda"))])

    def trainer(part: nn.Module, disabled: bool) -> SimpleNamespace:
        config = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=disabled))
        states = SimpleNamespace(states={})
        return SimpleNamespace(model_parts=[part], checkpointer=states, config=config)

    with pytest.raises(
        ValueError, match=r"set training\.disable_cuda_graphs \(--training\.disable-"
    ):
        torchtitan.compress(trainer(OnGpu(), disabled=False), "hybrid")
    assert not calls
    torchtitan.compress(trainer(OnGpu(), disabled=True), "hybrid")
    # On a CPU torchtitan leaves graphs out, whatever the option says.
    torchtitan.compress(trainer(nn.Linear(2, 2), disabled=False), "hybrid")


# Residuals beside a checkpoint


class Handle:
    """A compressor that notes what it is asked for."""

    groups = ()

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.asked.append((name, *args))


def test_a_checkpoint_without_residuals_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle()
    monkeypatch.setattr(residuals, "compressor", lambda model: handle)
    with pytest.warns(match=r"none does not exist.*without tagc: residuals keep their values"):
        assert not residuals.load_residuals(nn.Module(), lambda: tmp_path / "none")
    assert residuals.load_residuals(nn.Module(), lambda: tmp_path)
    assert handle.asked == [("refresh",), ("load", tmp_path)]


def test_only_wrapped_models_have_any() -> None:
    with pytest.raises(ValueError, match="not wrapped"):
        residuals.save_residuals(nn.Module(), "there")


@on_ranks(2)
def test_ranks_load_together_or_not_at_all(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["packed"])
    run(model, rank, range(2))
    with shared_folder() as folder:
        residuals.save_residuals(model, folder / "tagc")
        before = tagc.compressor(model).state_dict()

        def find() -> Path:
            if rank == 1:
                raise FileNotFoundError("there is no such checkpoint")
            return folder / "tagc"

        expected = FileNotFoundError if rank == 1 else RuntimeError
        with pytest.raises(expected, match="there is no such checkpoint"):
            residuals.load_residuals(model, find)
        with pytest.raises(RuntimeError, match=r"does not exist.*All ranks must share the folder"):
            residuals.load_residuals(model, lambda: folder / ("tagc" if rank == 0 else "none"))
        run(model, rank, range(2, 3))
        assert residuals.load_residuals(model, lambda: folder / "tagc")
        equal(tagc.compressor(model).state_dict(), before)

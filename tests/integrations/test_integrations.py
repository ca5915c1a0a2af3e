"""The integrations with stand-ins for the trainers; `tests/test_recipes.py` has the trainers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.states import POLICIES, run, shared_folder, wrapped
from support.trainers import Calls, Handle, imported, module
from tagc.handle.compressor import attached
from tagc.integrations import accelerate, residuals, torchtitan


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_what_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for key in [key for key in sys.modules if key.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, key)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        imported(monkeypatch, package, **{package: None})


# transformers


class Trainer:
    """Of transformers, as its callbacks see it."""

    def __init__(self, callback: Any, output_dir: Path, *, state: Any = None, **args: Any) -> None:
        self.callback = callback
        about = {"save_only_model": False, "resume_from_checkpoint": None, "save_strategy": "steps"}
        about |= {"max_grad_norm": 0, "fp16": False}
        self.args = SimpleNamespace(**{"output_dir": str(output_dir), **about, **args})
        self.state = state or SimpleNamespace(global_step=0, stateful_callbacks={})
        vars(self.state).setdefault("trial_name", None)
        vars(self.state).setdefault("trial_params", None)
        self.model: nn.Module = nn.Module()
        self.optimizer: Any = None

    def call(self, event: str) -> None:
        seen = {"model": self.model, "optimizer": self.optimizer}
        getattr(self.callback, event)(self.args, self.state, None, **seen)


def callback_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in = module(TrainerCallback=object)
    return imported(monkeypatch, "transformers", transformers=stand_in).TagcCallback


@pytest.fixture
def callback(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = callback_class(monkeypatch)
    place = sys.modules[made.__module__]
    monkeypatch.setattr(place, "sharding_groups", lambda model: ["a group"])
    return made


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


def test_the_callback_refuses_trials_without_a_name(
    callback: Any, calls: Calls, tmp_path: Path
) -> None:
    search = {"trial_name": None, "trial_params": {"learning_rate": 0.1}}
    state = SimpleNamespace(global_step=0, stateful_callbacks={}, **search)
    trainer = Trainer(callback(), tmp_path, state=state)
    with pytest.raises(ValueError, match=r"trial without a name.*hp_name=.*save_strategy=\"no\""):
        trainer.call("on_train_begin")
    assert calls == []
    Trainer(callback(), tmp_path, state=state, save_strategy="no").call("on_train_begin")
    assert [name for name, *_ in calls] == ["wrap"]


LIMIT = 0.005


def norm_of(model: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def trained_in_ddp(rank: int, folder: Path, steps: range, state: Any = None) -> tuple[Any, Any]:
    """Train like the Trainer with DDP: callbacks see the model inside, a loss calls DDP. Returns
    everything that the run ends with, and the state of the Trainer."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        callback = callback_class(monkeypatch)("one-bit", keep_rates=True, max_grad_norm=LIMIT)
    trainer = Trainer(callback, folder, state=state)
    torch.manual_seed(0 if state is None else 1)  # a resumed run's weights are the checkpoint's
    model = trainer.model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer.optimizer = SimpleNamespace(optimizer=optimizer)  # Accelerate's
    if state is not None:
        saved = torch.load(folder / "trainer.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    wrapped = DistributedDataParallel(model)
    loss = nn.Sequential(wrapped)
    trainer.call("on_train_begin")
    with torch.no_grad():
        loss(torch.ones(1, 128))  # an evaluation is no reason to wrap
    assert attached(wrapped) is None
    for step in steps:
        inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(2 * step + rank))
        loss(inputs).square().mean().backward()
        before = norm_of(model)
        trainer.call("on_pre_optimizer_step")
        # Above the limit by the codecs' noise, which clipping leaves out.
        assert LIMIT < norm_of(model) < 2 * LIMIT < before / 2
        optimizer.step()
        optimizer.zero_grad()
        trainer.state.global_step += 1
    trainer.call("on_save")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(saved, folder / "trainer.pt")
    dist.barrier()
    metrics = tagc.compressor(wrapped).metrics()
    assert metrics.dense_bytes > 8 * metrics.wire_bytes
    assert metrics.noise_factor > 1
    states = {**saved, "tagc": tagc.compressor(wrapped).state_dict()}
    trainer.call("on_train_end")
    assert "step" not in vars(optimizer)  # its rates are its own again
    return states, trainer.state


@on_ranks(2)
def test_the_callback_in_ddp_resumes_as_if_it_had_not_stopped(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        whole, _ = trained_in_ddp(rank, folder, range(4))
        _, state = trained_in_ddp(rank, folder, range(2))
        rest, _ = trained_in_ddp(rank, folder, range(2, 4), state)
    equal(rest, whole)


def test_the_callback_refuses_what_it_cannot_do(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = callback_class(monkeypatch)
    with pytest.raises(ValueError, match=r"nor put it into Distributed.*torchrun.*fsdp=True"):
        Trainer(made(), tmp_path).call("on_train_begin")
    for args, text in (
        (
            {"max_grad_norm": 1.0},
            r"clips gradients to 1\.0.*set TrainingArguments\(max_grad_norm=0",
        ),
        ({"fp16": True}, r"fp16=True scales.*bf16=True"),
    ):
        with pytest.raises(ValueError, match=text):
            Trainer(made(max_grad_norm=1.0), tmp_path, **args).call("on_train_begin")
    assert not calls


# Accelerate


def test_accelerates_hooks_save_and_load(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    handles: list[object] = [object()]
    monkeypatch.setattr(accelerate, "attached", lambda _: handles[-1])
    accelerator = SimpleNamespace(
        register_save_state_pre_hook=hooks.append, register_load_state_pre_hook=hooks.append
    )
    model = nn.Module()
    assert accelerate.wrap(accelerator, model, "hybrid", folder="tagc_1") is model
    save, load = hooks
    save([model], [], "there")
    load([], "there")
    handles.append(None)  # removed
    save([model], [], "there")
    load([], "there")
    folder = Path("there/tagc_1")
    assert calls == [("wrap", "hybrid"), ("save", folder), ("load", folder)]


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
    checkpointer = SimpleNamespace(enable=True)
    with pytest.raises(ValueError, match=r"needs model_parts.*Call tagc\.wrap"):
        torchtitan.compress(SimpleNamespace(model_parts=parts, checkpointer=checkpointer))
    checkpointer.enable = False  # its __init__ returns before there are states
    torchtitan.compress(SimpleNamespace(model_parts=parts, checkpointer=checkpointer))
    assert vars(checkpointer) == {"enable": False}


def test_torchtitans_graph(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a graph come first; then torchtitan warms up, captures and replays."""
    noted: list[str] = []
    handle: Any = SimpleNamespace(steps_before_capture=3, is_captured=False)
    handle.before_capture = lambda: noted.append("before capture")
    handle.before_replay = lambda: noted.append("before replay")
    monkeypatch.setattr(torchtitan, "compressor", lambda model: handle)

    class OnGpu(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([SimpleNamespace(device=torch.device("cuda"))])

    def run(x: int) -> int:
        noted.append("run")
        handle.steps_before_capture -= handle.steps_before_capture > 0
        return x

    def replay(x: int) -> int:
        """As torchtitan's wrapper: runs once, then captures and replays, then only replays."""
        noted.append("warm up" if "warm up" not in noted else "replay")
        handle.is_captured = noted[-1] == "replay"
        return x

    def trainer(part: nn.Module, disabled: bool) -> SimpleNamespace:
        config = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=disabled))
        states = SimpleNamespace(states={})
        own = {"fwd_bwd_fn": replay, "_forward_backward_body": run}
        return SimpleNamespace(model_parts=[part], checkpointer=states, config=config, **own)

    graphed = torchtitan.compress(trainer(OnGpu(), disabled=False), "hybrid")
    assert [graphed.fwd_bwd_fn(x) for x in range(6)] == [*range(6)]
    capture = ["before capture", "warm up", "before capture", "replay", "before replay", "replay"]
    assert noted == ["run"] * 3 + capture
    assert torchtitan.compress(trainer(OnGpu(), disabled=True), "hybrid").fwd_bwd_fn is replay
    other = trainer(OnGpu(), disabled=False)
    del other._forward_backward_body
    with pytest.raises(ValueError, match=r"set training\.disable_cuda_graphs \(--training\.dis"):
        torchtitan.compress(other, "hybrid")


# Residuals beside a checkpoint


def test_a_checkpoint_without_residuals_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle()
    monkeypatch.setattr(residuals, "compressor", lambda model: handle)
    with pytest.warns(match=r"none does not exist.*without tagc: residuals keep their values"):
        assert not residuals.load_residuals(nn.Module(), lambda: tmp_path / "none")
    assert residuals.load_residuals(nn.Module(), lambda: tmp_path)
    assert handle.asked == [("refresh",), ("load", tmp_path)]


@on_ranks(2)
def test_ranks_load_together_or_not_at_all(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["sketch"])
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

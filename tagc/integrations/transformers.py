"""Hugging Face transformers: a callback for its ``Trainer`` with FSDP2 or DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tagc.attach import sharding_groups
from tagc.handle.compressor import attached, compressor
from tagc.handle.noise import LearningRateScaling
from tagc.handle.wrapper import wrap
from tagc.integrations.residuals import FOLDER, load_residuals, missing, save_residuals

try:
    from transformers import TrainerCallback  # pyright: ignore
except ImportError as error:
    raise missing("transformers", error) from error


# Key in `trainer_state.json`, where the Trainer keeps the states of callbacks by class name. This
# is not the class name, because the Trainer would make a new callback from the state.
_KEY = "tagc"


class TagcCallback(TrainerCallback):  # pyright: ignore[reportGeneralTypeIssues]
    """Wraps the model that Accelerate has sharded with FSDP2 or put into DDP. Saves the residuals
    in the folder ``tagc`` of every checkpoint, and loads them when the Trainer resumes::

        Trainer(..., callbacks=[TagcCallback("hybrid")])

    With FSDP2 (``fsdp=True``) it wraps when training begins. With DDP it wraps in the first
    forward, because the Trainer shows callbacks only the model inside. In both cases the wrapped
    model is ``trainer.model_wrapped``.
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        keep_rates: bool = False,
        max_grad_norm: float | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            policy, options: see :func:`tagc.wrap`.
            keep_rates: see :meth:`tagc.Compressor.keep_rates`.
            max_grad_norm: the limit for :meth:`tagc.Compressor.clip_grad_norm_`, which the callback
                calls before each step of the optimizer. Set ``TrainingArguments(max_grad_norm=0)``,
                because the Trainer would clip by the norm with the codecs' noise.
            resume_from: the checkpoint to resume from, if it was moved: the Trainer tells callbacks
                only its step. By default the callback looks in
                ``TrainingArguments.resume_from_checkpoint``, in the folder where it was saved, and
                in ``output_dir``.
        """
        self.policy, self.resume_from, self.options = policy, resume_from, options
        self.keep_rates, self.max_grad_norm = keep_rates, max_grad_norm
        self._wrapped: nn.Module | None = None
        self._waiting: RemovableHandle | None = None
        self._kept: LearningRateScaling | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wrap the model, and load the residuals of a resumed run. With DDP both happen in the
        first forward, which then raises these errors.

        Raises:
            FileNotFoundError: if the checkpoint was saved with residuals and they are not found.
            ValueError: if the Trainer neither shards the model nor runs on several processes; if
                the Trainer clips gradients, too, or scales them (``fp16``); or if a hyperparameter
                search saves checkpoints of a trial without a name, so that their folder is not
                known.
            ValueError, tagc.PolicyError, tagc.StateError, RuntimeError: see :func:`tagc.wrap` and
                :meth:`tagc.Compressor.load`.
        """
        self._leave()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.max_grad_norm is not None:
            _check_clipping(args)
        saves = args.save_strategy != "no" and not args.save_only_model
        run = _run_folder(args, state) if saves else args.output_dir
        find = self._finder(args, state, run)
        state.stateful_callbacks[_KEY] = {"saved_to": os.path.abspath(run)}

        def begin(wrapped: nn.Module) -> None:
            if attached(wrapped) is None:
                wrap(wrapped, self.policy, **self.options)
            self._wrapped = wrapped
            if self.keep_rates:
                # Accelerate's optimizer holds the one that steps.
                its = getattr(optimizer, "optimizer", optimizer)
                self._kept = compressor(wrapped).keep_rates(its)
            if state.global_step:
                load_residuals(wrapped, find)

        if sharding_groups(model):
            begin(model)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            self._wait_for_ddp(model, begin)
        else:
            raise _not_distributed()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip gradients, if asked to.

        Raises:
            ValueError: if the first backward was neither FSDP's nor DDP's.
        """
        if self._wrapped is None:
            raise _not_distributed()
        if self.max_grad_norm is not None:
            compressor(self._wrapped).clip_grad_norm_(self.max_grad_norm)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the residuals into the checkpoint that the Trainer has just written.

        Raises:
            ValueError: if the folder is not known (see :meth:`on_train_begin`).
            OSError, tagc.StateError, RuntimeError: see :meth:`tagc.Compressor.save`.
        """
        if not args.save_only_model and self._wrapped is not None:
            folder = _checkpoint(_run_folder(args, state), state) / FOLDER
            save_residuals(self._wrapped, folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refresh the copies of parameters, which ``load_best_model_at_end`` may have changed."""
        if self._wrapped is not None:
            compressor(self._wrapped).refresh()
        self._leave()

    def _leave(self) -> None:
        """Leave model and optimizer to the next training, which may have others."""
        if self._waiting is not None:
            self._waiting.remove()
        if self._kept is not None:
            self._kept.remove()
        self._wrapped = self._waiting = self._kept = None

    def _wait_for_ddp(self, model: nn.Module, begin: Callable[[nn.Module], None]) -> None:
        """Call ``begin`` with the DDP around ``model`` in its first forward of a training step.

        A model does not know the DDP around it, so each module that is called is asked for it,
        until one has it: DDP itself, or what holds it (a compiled model, a loss).
        """

        def look(module: nn.Module, _: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for ddp in module.modules():
                if isinstance(ddp, DistributedDataParallel) and ddp.module is model:
                    waiting.remove()
                    begin(ddp)
                    return

        self._waiting = waiting = register_module_forward_pre_hook(look)

    def _finder(self, args: Any, state: Any, run: str) -> Callable[[], Path]:
        """What returns the residuals' folder in the checkpoint from which training resumes."""
        saved = state.stateful_callbacks.get(_KEY)
        folders = [] if saved is None else [saved["saved_to"]]
        places = [_checkpoint(folder, state) for folder in (*folders, run)]
        if isinstance(args.resume_from_checkpoint, str):
            places.insert(0, Path(args.resume_from_checkpoint))
        if self.resume_from is not None:
            places = [Path(self.resume_from)]
        places = list(dict.fromkeys(place / FOLDER for place in places))

        def find() -> Path:
            if saved is None:  # the checkpoint was saved without this callback
                return places[0]
            found = next((place for place in places if place.exists()), None)
            if found is None:
                looked = " nor in ".join(map(str, places))
                raise FileNotFoundError(
                    f"the checkpoint of step {state.global_step} was saved with residuals of tagc, "
                    f"which are not in {looked}: pass its folder, "
                    "TagcCallback(..., resume_from=folder)"
                )
            return found

        return find


def _check_clipping(args: Any) -> None:
    if args.max_grad_norm:
        raise ValueError(
            f"the Trainer clips gradients to {args.max_grad_norm}, by a norm with the codecs' "
            "noise, before TagcCallback(max_grad_norm=...) does: set "
            "TrainingArguments(max_grad_norm=0)"
        )
    if args.fp16:
        raise ValueError(
            "TagcCallback(max_grad_norm=...) cannot clip gradients that fp16=True scales: train "
            "with bf16=True, or let the Trainer clip, TrainingArguments(max_grad_norm=...)"
        )


def _not_distributed() -> ValueError:
    return ValueError(
        "the Trainer has neither sharded the model nor put it into DistributedDataParallel, so "
        "tagc has no traffic to compress: start the script on several processes (torchrun), or "
        "shard the model, TrainingArguments(fsdp=True)"
    )


def _run_folder(args: Any, state: Any) -> str:
    """The folder for checkpoints; in a hyperparameter search, a folder of the trial."""
    # Not `is_hyper_param_search`, which a resumed run has from its checkpoint.
    if state.trial_params is None:
        return args.output_dir
    if not state.trial_name:
        raise ValueError(
            "a hyperparameter search saves the checkpoints of a trial without a name in a folder "
            "that the Trainer does not tell callbacks, so their residuals cannot be saved: name "
            "trials, hyperparameter_search(..., hp_name=lambda trial: ...), or save no "
            'checkpoints, TrainingArguments(save_strategy="no")'
        )
    return os.path.join(args.output_dir, state.trial_name)


def _checkpoint(run: str, state: Any) -> Path:
    return Path(run) / f"checkpoint-{state.global_step}"

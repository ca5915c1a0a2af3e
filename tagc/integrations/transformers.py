"""Hugging Face transformers: a callback for its ``Trainer`` with FSDP2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tagc.handle.compressor import attached, compressor
from tagc.handle.wrapper import wrap
from tagc.integrations.optional import missing
from tagc.integrations.residuals import FOLDER, load_residuals, save_residuals

try:
    from transformers import TrainerCallback  # pyright: ignore
except ImportError as error:
    raise missing("transformers", error) from error


# Key in `trainer_state.json`, where the Trainer keeps the states of callbacks by class name. This
# is not the class name, because the Trainer would make a new callback from the state.
_KEY = "tagc"


class TagcCallback(TrainerCallback):  # pyright: ignore[reportGeneralTypeIssues]
    """Wraps the model when training begins, after Accelerate has sharded it. Saves the residuals in
    the folder ``tagc`` of every checkpoint, and loads them when the Trainer resumes::

        Trainer(..., callbacks=[TagcCallback("hybrid")])

    The Trainer must shard with FSDP2 (``fsdp="full_shard", fsdp_config={"fsdp_version": 2, ...}``).
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            policy, options: see :func:`tagc.wrap`.
            resume_from: the checkpoint to resume from, if it was moved: the Trainer tells callbacks
                only its step. By default the callback looks in
                ``TrainingArguments.resume_from_checkpoint``, in the folder where it was saved, and
                in ``output_dir``.
        """
        self.policy, self.resume_from, self.options = policy, resume_from, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wrap the model, and load the residuals of a resumed run.

        Raises:
            FileNotFoundError: if the checkpoint was saved with residuals and they are not found.
            ValueError: if a hyperparameter search saves checkpoints of a trial without a name, so
                that their folder is not known.
            ValueError, tagc.PolicyError, tagc.StateError, RuntimeError: see :func:`tagc.wrap` and
                :meth:`tagc.Compressor.load`.
        """
        model = kwargs["model"]
        saves = args.save_strategy != "no" and not args.save_only_model
        run = _run_folder(args, state) if saves else args.output_dir
        if attached(model) is None:
            wrap(model, self.policy, **self.options)
        if state.global_step:
            load_residuals(model, lambda: self._folder_of(args, state, run))
        state.stateful_callbacks[_KEY] = {"saved_to": os.path.abspath(run)}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the residuals into the checkpoint that the Trainer has just written.

        Raises:
            ValueError: if the folder is not known (see :meth:`on_train_begin`).
            OSError, tagc.StateError, RuntimeError: see :meth:`tagc.Compressor.save`.
        """
        if not args.save_only_model:
            folder = _checkpoint(_run_folder(args, state), state) / FOLDER
            save_residuals(kwargs["model"], folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refresh the copies of parameters, which ``load_best_model_at_end`` may have changed."""
        compressor(kwargs["model"]).refresh()

    def _folder_of(self, args: Any, state: Any, run: str) -> Path:
        """The residuals' folder in the checkpoint from which training resumes."""
        said = state.stateful_callbacks.get(_KEY)
        folders = [] if said is None else [said["saved_to"]]
        places = [_checkpoint(folder, state) for folder in (*folders, run)]
        if isinstance(args.resume_from_checkpoint, str):
            places.insert(0, Path(args.resume_from_checkpoint))
        if self.resume_from is not None:
            places = [Path(self.resume_from)]
        places = list(dict.fromkeys(place / FOLDER for place in places))
        if said is None:  # the checkpoint was saved without this callback
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

"""The Trainer of Hugging Face transformers, by a callback: save, and resume as if nothing had
happened. FSDP2 needs GPUs, as FSDP in Accelerate does; `--ddp` does not. The model is made from a
config: nothing is downloaded.

torchrun --standalone --nproc-per-node 2 examples/recipes/transformers_trainer.py --output runs/hf
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from task import LENGTH, VOCABULARY, WIDTH
from torch.utils.data import Dataset
from transformers import (  # pyright: ignore
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import tagc
from tagc.integrations.transformers import TagcCallback


class Counting(Dataset):
    """Sequences that count up from somewhere: it learns to count."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (index * 7 + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class PrintLosses(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}, loss {float(logs['loss']):.9g}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stop-after", type=int, help="save here, and stop")
    parser.add_argument("--ddp", action="store_true", help="DDP in place of FSDP2")
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument(
        "--keep-rates", action="store_true", help="correct the learning rate and clipping for noise"
    )
    parser.add_argument("--output", default="runs/trainer")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in OUTPUT")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    limit = 1.0
    callback = TagcCallback(
        args.policy,
        keep_rates=args.keep_rates,
        max_grad_norm=limit if args.keep_rates else None,
    )
    fsdp_config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            args.output,
            max_steps=args.steps,
            save_steps=args.stop_after or args.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=1,
            lr_scheduler_type="constant",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            max_grad_norm=0 if args.keep_rates else limit,
            ddp_find_unused_parameters=False,
            fsdp=not args.ddp,  # pyright: ignore
            fsdp_config=None if args.ddp else fsdp_config,
        ),
        train_dataset=Counting(),
        callbacks=[callback, PrintLosses()],
    )
    if args.stop_after:
        trainer.add_callback(StopAfter(args.stop_after))
    trainer.train(resume_from_checkpoint=args.resume)
    assert trainer.model_wrapped is not None
    metrics = tagc.compressor(trainer.model_wrapped).metrics()
    if trainer.is_world_process_zero():
        ratio = metrics.dense_bytes / metrics.wire_bytes
        print(f"{ratio:.1f} times fewer gradient bytes")


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


if __name__ == "__main__":
    main()

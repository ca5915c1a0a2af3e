"""Train a small GPT from the same seed with dense FSDP2, then with `tagc.wrap` and each policy.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --policies hybrid,attn-only
    python examples/train_gpt.py --ranks 2        # it starts torchrun itself

FSDP2 gathers parameters and reduces gradients in bf16; the optimizer has fp32. It ends with a
comparison of loss, bytes and time, which it also writes to --out.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from report import Run, write_report
from text import Corpus, load_corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

import tagc

UNTIMED_STEPS = 5
HELD_OUT_WINDOWS = 256


def main() -> None:
    args = parse_arguments()
    try:
        corpus = load_corpus(args.data)
        for policy in args.policies:
            tagc.Policy.load(policy)  # report a misspelt policy before the dense run
    except (OSError, ValueError) as error:
        raise SystemExit(f"train_gpt: {error}") from None
    if "RANK" not in os.environ:
        start_torchrun(args.ranks)

    place = ParamLocation.join()
    place.print(
        f"{place.ranks} ranks on {place.device.type}, {args.steps} steps of {args.batch} × "
        f"{GPTConfig().context} bytes per rank, from {corpus.source}"
    )
    try:
        runs = [train_one_run(p, args, corpus, place) for p in (*args.baseline, *args.policies)]
    finally:
        dist.destroy_process_group()
    if place.rank == 0:
        settings = vars(args) | {"ranks": place.ranks, "device": place.device.type}
        settings |= {"corpus": corpus.source, "torch": torch.__version__}
        plain_settings = {k: _plain(v) for k, v in settings.items()}
        print("\n" + write_report(runs, plain_settings, args.out, args.link))
        print(f"written to {args.out}: summary.md, summary.json, losses.csv, losses.png")


def train_one_run(
    policy: str | None, args: argparse.Namespace, corpus: Corpus, place: ParamLocation
) -> Run:
    """Train one model, with plain FSDP2 if `policy` is None; every rank returns the same losses."""
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig()).to(place.device)
    mesh = init_device_mesh(place.device.type, (place.ranks,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)

    # The one line that compresses.
    if policy is not None:
        model = tagc.wrap(model, policy=policy)
        place.print(f"\n{tagc.compressor(model).plan()}")

    name = "plain FSDP2" if policy is None else Path(policy).stem
    optimizer, schedule = make_optimizer(model, args)
    clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    # Rate and limit of the uncompressed run; without it, some policies need others.
    if policy is not None:
        tagc.compressor(model).keep_rates(optimizer)
        clip = tagc.compressor(model).clip_grad_norm_
    length = model.config.context
    train_losses = torch.zeros(args.steps, device=place.device)
    validation_losses: dict[int, float] = {}
    seconds: list[float] = []
    traffic = Traffic(model, policy, place.ranks)
    bar = place.progress_bar(name, args.steps)
    for step in range(args.steps):
        traffic.start_step()
        batch = corpus.batch(args.batch, length, seed=args.seed, step=step, rank=place.rank)
        tokens, targets = (tensor.to(place.device) for tensor in batch)
        place.synchronize()
        start = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        clip(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        place.synchronize()
        seconds.append(time.perf_counter() - start)

        train_losses[step] = loss.detach()
        traffic.end_step()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            validation_losses[step + 1] = evaluate(model, corpus, place)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update()
    bar.close()

    warm_up = 0 if policy is None else tagc.compressor(model).plan().warmup_steps
    settled = min(warm_up + UNTIMED_STEPS, args.steps - 1)
    return Run(
        name=name,
        train_losses=mean_over_ranks(train_losses).tolist(),
        validation_losses=validation_losses,
        wire_bytes=list(accumulate(map(add, traffic.gradients, traffic.parameters))),
        step_seconds=statistics.median(seconds[settled:]),
        gradient_bytes_per_step=statistics.fmean(traffic.gradients[settled:]),
        parameter_bytes_per_step=statistics.fmean(traffic.parameters[settled:]),
        dense_gradient_bytes_per_step=traffic.dense_gradients,
        dense_parameter_bytes_per_step=traffic.dense_parameters,
        **selection(model, policy),
    )


def make_optimizer(
    model: nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW: warm-up for a tenth of the steps, then a cosine down to a tenth of the rate."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    warm_up = max(1, args.steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, args.steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, place: ParamLocation) -> float:
    """Mean loss over the same held-out windows every time, split among the ranks."""
    batch = corpus.held_out(
        HELD_OUT_WINDOWS, model.config.context, rank=place.rank, ranks=place.ranks
    )
    tokens, targets = (tensor.to(place.device) for tensor in batch)
    return mean_over_ranks(model(tokens, targets)).item()


class Traffic:
    """Bytes that this rank sends to others in each training step; validation is not counted.

    For plain FSDP2 they are the bytes of ideal bf16 collectives: (W−1)/W of each unit's buffer.
    FSDP2 splits every parameter along dimension 0 into W chunks and pads all to the first one's
    size. It gathers the blocks twice, because it frees their parameters after the forward.
    """

    def __init__(self, model: nn.Module, policy: str | None, ranks: int) -> None:
        self._compressor = None if policy is None else tagc.compressor(model)
        self.gradients: list[int] = []
        self.parameters: list[int] = []
        self.dense_gradients = self.dense_parameters = 0
        for name, p in model.named_parameters():
            shard = math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:])
            sent = (ranks - 1) * shard * torch.bfloat16.itemsize
            self.dense_gradients += sent
            self.dense_parameters += sent * (2 if ".h." in name else 1)

    def start_step(self) -> None:
        if self._compressor is not None:
            self._before = self._compressor.wire_bytes, self._compressor.parameter_wire_bytes

    def end_step(self) -> None:
        gradients, parameters = self.dense_gradients, self.dense_parameters
        if self._compressor is not None:
            gradients = self._compressor.wire_bytes - self._before[0]
            # 0 if the policy leaves them to FSDP.
            gathered = self._compressor.parameter_wire_bytes - self._before[1]
            parameters = gathered or parameters
        self.gradients.append(gradients)
        self.parameters.append(parameters)


def selection(model: nn.Module, policy: str | None) -> dict[str, Any]:
    """The fields of `Run` that explain the bytes."""
    if policy is None:
        return {}
    metrics = tagc.compressor(model).metrics()
    sparse = metrics.density_target < 1
    return {
        "density_target": metrics.density_target if sparse else None,
        "density": metrics.density if sparse else None,
        "unresolved": metrics.unresolved,
        "residual_norm": metrics.residual_norm,
        "parameter_error": metrics.parameter_error,
    }


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value / dist.get_world_size()
    dist.all_reduce(value)
    return value


@dataclass(frozen=True, kw_only=True)
class ParamLocation:
    """This process: one rank of many, on one device."""

    rank: int
    ranks: int
    device: torch.device

    @staticmethod
    def join() -> ParamLocation:
        """Join the process group that torchrun describes: NCCL with a GPU per rank, else gloo."""
        local_rank, local_ranks = (int(os.environ[k]) for k in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        torch.set_num_threads(max(1, cores() // local_ranks))
        if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            device = torch.device("cpu")
            dist.init_process_group("gloo")
        return ParamLocation(rank=dist.get_rank(), ranks=dist.get_world_size(), device=device)

    def print(self, message: str) -> None:
        if self.rank == 0:
            print(message, flush=True)

    def progress_bar(self, name: str, steps: int) -> tqdm:
        # In a log file every refresh would be a line.
        interval = 0.2 if sys.stderr.isatty() else 15
        return tqdm(
            total=steps,
            desc=name,
            mininterval=interval,
            maxinterval=4 * interval,
            disable=self.rank != 0,
        )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def parse_arguments() -> argparse.Namespace:
    started = int(os.environ.get("WORLD_SIZE", 2))  # torchrun's, if it is running
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--policies",
        default="hybrid,attn-only",
        type=lambda text: [name for name in text.split(",") if name],
        help="names of policies or YAML files, separated by commas; a run each",
    )
    parser.add_argument(
        "--no-baseline",
        dest="baseline",
        action="store_const",
        const=[],
        default=[None],
        help="leave the run with plain FSDP2 out",
    )
    parser.add_argument("--steps", default=300, type=positive, help="optimizer steps per run")
    parser.add_argument("--ranks", default=started, type=positive, help="processes to start")
    parser.add_argument("--data", type=Path, help="text file to train on; None: standard library")
    parser.add_argument("--batch", default=4, type=positive, help="sequences per rank and step")
    parser.add_argument("--lr", default=2e-3, type=float, help="peak learning rate")
    parser.add_argument("--seed", default=0, type=int, help="of the weights and the batches")
    parser.add_argument("--eval-every", default=100, type=positive, help="steps per validation")
    parser.add_argument("--link", help="names the link that ranks are on; None: predict links")
    parser.add_argument("--out", default=Path("runs/demo"), type=Path, help="where results go")
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ and args.ranks != started:
        parser.error(f"--ranks {args.ranks}, but torchrun started {started}")
    return args


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def start_torchrun(ranks: int) -> None:
    """Replace this process by torchrun on this script, with the same arguments."""
    # Set, or torchrun prints a notice; each rank settles its own number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    sys.stdout.flush()
    os.execv(sys.executable, [*torchrun, "--nproc-per-node", str(ranks), __file__, *sys.argv[1:]])


def cores() -> int:
    # The cores that this process may use, if the system can tell (not on macOS).
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()

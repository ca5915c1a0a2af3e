"""``aggregate``: one process adds up the messages of N workers and sends the sum back, as a switch
or a parameter server would (the setting of LHC, arXiv 2402.07529); needs root.

Each is in a network namespace of its own. Sketches are added as integers, without decoding. Other
codes are decoded, added, and encoded again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codecs.sketch.count_sketch import CountSketch
from tagc.ops import get_ops

from ..kernels.case import Case
from ..kernels.ops.codecs import blocks
from ..kernels.ops.messages import Codec, Row
from ..machine import machine
from ..options import add_outputs
from ..records import Record, append, markdown, read
from . import launch
from .namespaces import Network, NetworkUnavailable, Rate

DENSITY = 0.05  # LHC's benchmark
_OPS = get_ops(torch.device("cpu"), "cpu")
# All workers' gradients have this part in common; the rest is as large, and each worker's own.
_COMMON = 0.5


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to add up.

    Attributes:
        message: what this worker sends.
        answer: of the dtype and size of what comes back.
        add: writes the sum of messages ``[N, ...]`` to ``answer``.
        read: the sum, ``[numel]`` float32, of an answer.
        expected: what the workers read at the end, if the way is exact; None if it rounds.
    """

    name: str
    message: Tensor
    answer: Tensor
    add: Callable[[Tensor, Tensor], object]
    read: Callable[[Tensor], Tensor]
    expected: Tensor | None = None


about = "one process that adds up the messages of many; needs root"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--workers", type=int, default=4, help="processes that send (default: %(default)s)")
    add("--rates", default="unlimited,1gbit,100mbit", help="of links (default: %(default)s)")
    add("--numel", type=int, default=1 << 22, help="elements of a gradient (default: %(default)s)")
    add("--rounds", type=int, default=7, help="of each way; medians count (default: %(default)s)")
    add_outputs(parser, plots=False)


def run(args: argparse.Namespace) -> int:
    """Measure at every rate and print the tables; 2 if that is impossible here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.jsonl"
        try:
            rates = [Rate.parse(text) for text in args.rates.split(",")]
            with Network(args.workers + 1) as network:
                for rate in rates:
                    network.limit(rate)
                    wanted = {"link": str(rate), "numel": args.numel, "rounds": args.rounds}
                    command = [sys.executable, "-m", __name__, json.dumps(wanted), str(file)]
                    if status := launch.run(network, command):
                        return status
        except (NetworkUnavailable, ValueError) as error:
            print(f"benchmarks aggregate: {error}", file=sys.stderr)
            return 2
        records = read([file])
    for record in records if args.json else []:
        append(args.json, record)
    print(table(records))
    return 0


def table(records: Sequence[Record]) -> str:
    """A table for each link, as Markdown. Ratios are to its first row."""
    return "\n\n".join(
        _table(link, [r for r in records if r["link"] == link])
        for link in dict.fromkeys(r["link"] for r in records)
    )


def _table(link: str, rows: Sequence[Record]) -> str:
    first = rows[0]
    label = Rate.parse(link).label
    head = [
        "way",
        "bits in",
        "bits out",
        "adds, M elements/s",
        "ratio",
        f"round, {label}",
        "faster",
    ]
    lines = []
    for row in rows:
        elements = row["workers"] * row["numel"]
        lines.append(
            [
                row["way"],
                f"{8 * row['received_bytes'] / elements:.2f}",
                f"{8 * row['sent_bytes'] / elements:.2f}",
                f"{elements / row['add_seconds'] / 1e6:.0f}",
                f"{first['add_seconds'] / row['add_seconds']:.2f}×",
                f"{1e3 * row['round_seconds']:.0f} ms",
                f"{first['round_seconds'] / row['round_seconds']:.2f}×",
            ]
        )
    return markdown(head, lines)


def measure(link: str, numel: int, rounds: int, file: Path) -> None:
    """One process's part; rank 0 adds, and writes a record for each way. The ways take turns."""
    dist.init_process_group("gloo")
    workers, rank = dist.get_world_size() - 1, dist.get_rank()
    torch.set_num_threads(1)
    ways = make_ways(gradients(numel, workers), max(0, rank - 1))
    turns = [[one_round(way, workers) for way in ways] for _ in range(rounds + 1)][1:]
    for i, way in enumerate(ways if rank == 0 else []):
        seconds, added = (statistics.median(turn[i][part] for turn in turns) for part in (0, 1))
        record = {
            "suite": "aggregate",
            **machine(),
            "way": way.name,
            "link": link,
            "workers": workers,
            "numel": numel,
            "received_bytes": workers * way.message.nbytes,
            "sent_bytes": workers * way.answer.nbytes,
            "round_seconds": seconds,
            "add_seconds": added,
        }
        append(file, record)
    dist.destroy_process_group()


def one_round(way: Way, workers: int) -> tuple[float, float]:
    """Seconds until rank 0 knows that every worker has read the sum, and of them those for adding.

    Raises:
        RuntimeError: if a worker does not read the exact sum of an exact way.
    """
    dist.barrier()
    start = time.perf_counter()
    answer = torch.empty_like(way.answer)
    if dist.get_rank():
        dist.send(way.message, 0)
        dist.recv(answer, 0)
        total = way.read(answer)
        dist.send(torch.ones(1), 0)
        if way.expected is not None and not torch.equal(total, way.expected):
            raise RuntimeError(f"{way.name}: not the exact sum")
        return 0.0, 0.0
    messages = way.message.new_empty(workers, *way.message.shape)
    arriving = [dist.irecv(message, i + 1) for i, message in enumerate(messages)]
    for one in arriving:
        assert one is not None
        one.wait()
    before = time.perf_counter()
    way.add(messages, answer)
    added = time.perf_counter() - before
    for one in [dist.isend(answer, i + 1) for i in range(workers)]:
        assert one is not None
        one.wait()
    for i in range(workers):
        dist.recv(torch.empty(1), i + 1)
    return time.perf_counter() - start, added


def gradients(numel: int, workers: int) -> list[Tensor]:
    """Every worker's gradient, ``[numel]`` float32."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(numel, generator=generator)
    own = [torch.randn(numel, generator=generator) for _ in range(workers)]
    return [_COMMON * common + (1 - _COMMON) * noise for noise in own]


def make_ways(xs: list[Tensor], worker: int) -> list[Way]:
    """All ways, with the message of one worker."""
    x, numel = xs[worker], xs[0].numel()
    four = Case(op="quantize", numel=numel, bits=4)
    return [
        _dense("dense fp32", x),
        _dense("dense bf16", x.bfloat16()),
        _coded("4 bits, decoded and encoded again", x, *[lambda row: blocks(four, row)] * 2),
        _sketch("sketch of each worker's 5%, int8x4", xs, worker, "int8x4", shared=False),
        _sketch("sketch of a shared 5%, int8x4", xs, worker, "int8x4", shared=True),
        _sketch(
            "sketch of each worker's 5%, int32x1 (as LHC)", xs, worker, "int32x1", shared=False
        ),
    ]


def _dense(name: str, message: Tensor) -> Way:
    def add(messages: Tensor, answer: Tensor) -> None:
        # Sums in float32, in the order of ranks.
        total = messages[0].float()
        for one in messages[1:]:
            total += one
        answer.copy_(total)

    return Way(name=name, message=message, answer=message, add=add, read=Tensor.float)


def _coded(
    name: str, x: Tensor, inbound: Callable[[Row], Codec], outbound: Callable[[Row], Codec]
) -> Way:
    total = torch.empty_like(x)  # rank 0's sum, over the number of workers

    def row(values: Tensor) -> Row:
        return Row(grad=values[None], residual=torch.zeros(1, values.numel()), x=values)

    def message_of(codec: Codec) -> Tensor:
        message = torch.zeros(1, codec.words, dtype=torch.int32)
        codec.send(_OPS, torch.zeros(1, x.numel()), message)
        return message

    def add(messages: Tensor, answer: Tensor) -> None:
        first.read(_OPS, messages.flatten(0, 1), total)
        second.send(_OPS, no_residual, answer)

    def read(answer: Tensor) -> Tensor:
        out = torch.empty_like(x)
        second.read(_OPS, answer, out)
        return out

    first, no_residual = inbound(row(x)), torch.zeros(1, x.numel())
    message = message_of(first)
    first.read(_OPS, message, total)
    second = outbound(row(total))
    return Way(name=name, message=message, answer=message_of(second), add=add, read=read)


def _sketch(name: str, xs: list[Tensor], worker: int, symbol: str, *, shared: bool) -> Way:
    workers, numel = len(xs), xs[0].numel()
    codec = CountSketch(numel, keys=1, symbol=symbol)
    lanes, kept = codec.symbol.lanes, round(DENSITY * numel / codec.symbol.lanes)
    levels = min(127, codec.symbol.levels(workers))
    quantized = [_largest(x, lanes, kept, levels, xs[0] if shared else x) for x in xs]
    keys = kept if shared else min(numel // lanes, workers * kept)
    codec = CountSketch(numel, keys=keys, symbol=symbol, ops="cpu")
    sent = codec.encode(quantized[worker])
    words = sent.index.numel()

    def add(messages: Tensor, answer: Tensor) -> None:
        answer.copy_(messages[0])
        for one in messages[1:]:
            answer[:words] |= one[:words]
            answer[words:] += one[words:]

    def read(answer: Tensor) -> Tensor:
        out = torch.empty(numel)
        index = torch.cat([answer[:words], torch.zeros(1, dtype=torch.int32)])[None]
        layout = codec.layout
        _OPS.decode(index, answer[words:], one, seed, out, None, stats, layout=layout, divisor=1)
        return out

    message = torch.cat([sent.index, sent.cells])
    seed, stats = (torch.zeros(n, dtype=torch.int32) for n in (1, 2))
    one = torch.ones(1)  # the quantization step
    expected = torch.stack(quantized).sum(0, dtype=torch.int32).float()
    return Way(name=name, message=message, answer=message, add=add, read=read, expected=expected)


def _largest(x: Tensor, lanes: int, kept: int, levels: int, chosen_by: Tensor) -> Tensor:
    """The groups of ``lanes`` that are the largest in ``chosen_by``, as integers; 0 elsewhere."""
    size = chosen_by.view(-1, lanes).abs().amax(1)
    mask = torch.zeros_like(size, dtype=torch.bool)
    mask[size.topk(kept).indices] = True
    q = (x * (levels / x.abs().max())).round().to(torch.int32)
    return q * mask.repeat_interleave(lanes)


if __name__ == "__main__":
    measure(**json.loads(sys.argv[1]), file=Path(sys.argv[2]))

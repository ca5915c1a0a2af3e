"""``aggregate``: one process adds up the messages of N workers and sends the sum back, as a switch
or a parameter server would (the setting of LHC, arXiv 2402.07529); needs root.

Each is in a network namespace of its own. Dense gradients are added as float32, sketches as
integers, without decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codecs.sketch.count_sketch import CountSketch
from tagc.ops import get_ops

from ..records import Record, add_outputs, append, machine, markdown
from .launch import Network, Rate

DENSITY = 0.05  # LHC's benchmark
_OPS = get_ops(torch.device("cpu"), "cpu")
# All workers' gradients have this part in common; the rest is as large, and each worker's own.
_COMMON = 0.5


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to add up.

    Attributes:
        message: what this worker sends; the answer is as large.
        add: writes the sum of messages ``[N, ...]`` to an answer.
        read: the sum, ``[numel]`` float32, of an answer.
        expected: what the workers read at the end.
    """

    name: str
    message: Tensor
    add: Callable[[Tensor, Tensor], object]
    read: Callable[[Tensor], Tensor]
    expected: Tensor


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
    """Measure at every rate and print the tables."""
    records: list[Record] = []
    for rate in [Rate.parse(text) for text in args.rates.split(",")]:
        with Network(args.workers + 1, rate=rate) as network:
            records += network.on_ranks(measure, str(rate), args.numel, args.rounds)
    for record in records if args.json else []:
        append(args.json, record)
    print(table(records))
    return 0


def table(records: Sequence[Record]) -> str:
    """A table for each link, as Markdown. Ratios are to its first row."""
    head = ["way", "bits in", "bits out", "adds, M elements/s", "ratio", "round", "faster"]
    tables = []
    for link in dict.fromkeys(r["link"] for r in records):
        rows = [r for r in records if r["link"] == link]
        lines = []
        for r in rows:
            elements = r["workers"] * r["numel"]
            lines.append(
                [
                    r["way"],
                    f"{8 * r['received_bytes'] / elements:.2f}",
                    f"{8 * r['sent_bytes'] / elements:.2f}",
                    f"{elements / r['add_seconds'] / 1e6:.0f}",
                    f"{rows[0]['add_seconds'] / r['add_seconds']:.2f}×",
                    f"{1e3 * r['round_seconds']:.0f} ms",
                    f"{rows[0]['round_seconds'] / r['round_seconds']:.2f}×",
                ]
            )
        tables.append(f"{Rate.parse(link).label}\n\n{markdown(head, lines)}")
    return "\n\n".join(tables)


def measure(link: str, numel: int, rounds: int) -> list[Record]:
    """One process's part; rank 0 adds, and has a record for each way. The ways take turns."""
    workers, rank = dist.get_world_size() - 1, dist.get_rank()
    torch.set_num_threads(1)
    xs, worker = gradients(numel, workers), max(0, rank - 1)
    ways = [
        _dense(xs, worker),
        _sketch("sketch of each worker's 5%, int8x4", xs, worker, shared=False),
        _sketch("sketch of a shared 5%, int8x4", xs, worker, shared=True),
    ]
    turns = [[one_round(way, workers) for way in ways] for _ in range(rounds + 1)][1:]
    records = []
    for i, way in enumerate(ways):
        seconds, added = (statistics.median(turn[i][part] for turn in turns) for part in (0, 1))
        records.append(
            {
                "suite": "aggregate",
                **machine(),
                "way": way.name,
                "link": link,
                "workers": workers,
                "numel": numel,
                "received_bytes": workers * way.message.nbytes,
                "sent_bytes": workers * way.message.nbytes,
                "round_seconds": seconds,
                "add_seconds": added,
            }
        )
    return records


def one_round(way: Way, workers: int) -> tuple[float, float]:
    """Seconds until rank 0 knows that every worker has read the sum, and of them those for adding.

    Raises:
        RuntimeError: if a worker does not read the exact sum.
    """
    dist.barrier()
    start = time.perf_counter()
    answer = torch.empty_like(way.message)
    if dist.get_rank():
        dist.send(way.message, 0)
        dist.recv(answer, 0)
        total = way.read(answer)
        dist.send(torch.ones(1), 0)
        if not torch.equal(total, way.expected):
            raise RuntimeError(f"{way.name}: not the exact sum")
        return 0.0, 0.0
    messages = way.message.new_empty(workers, *way.message.shape)
    _wait([dist.irecv(message, i + 1) for i, message in enumerate(messages)])
    before = time.perf_counter()
    way.add(messages, answer)
    added = time.perf_counter() - before
    _wait([dist.isend(answer, i + 1) for i in range(workers)])
    for i in range(workers):
        dist.recv(torch.empty(1), i + 1)
    return time.perf_counter() - start, added


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def gradients(numel: int, workers: int) -> list[Tensor]:
    """Every worker's gradient, ``[numel]`` float32."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(numel, generator=generator)
    own = [torch.randn(numel, generator=generator) for _ in range(workers)]
    return [_COMMON * common + (1 - _COMMON) * noise for noise in own]


def _dense(xs: list[Tensor], worker: int) -> Way:
    def add(messages: Tensor, answer: Tensor) -> None:
        # In the order of ranks.
        answer.copy_(messages[0])
        for one in messages[1:]:
            answer += one

    expected = torch.empty_like(xs[0])
    add(torch.stack(xs), expected)
    return Way(name="dense fp32", message=xs[worker], add=add, read=Tensor.float, expected=expected)


def _sketch(name: str, xs: list[Tensor], worker: int, *, shared: bool) -> Way:
    workers, numel = len(xs), xs[0].numel()
    codec = CountSketch(numel, keys=1, symbol="int8x4")
    lanes, kept = codec.symbol.lanes, round(DENSITY * numel / codec.symbol.lanes)
    levels = min(127, codec.symbol.levels(workers))
    quantized = [_largest(x, lanes, kept, levels, xs[0] if shared else x) for x in xs]
    keys = kept if shared else min(numel // lanes, workers * kept)
    codec = CountSketch(numel, keys=keys, symbol="int8x4", ops="cpu")
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
    return Way(name=name, message=message, add=add, read=read, expected=expected)


def _largest(x: Tensor, lanes: int, kept: int, levels: int, chosen_by: Tensor) -> Tensor:
    """The groups of ``lanes`` that are the largest in ``chosen_by``, as integers; 0 elsewhere."""
    size = chosen_by.view(-1, lanes).abs().amax(1)
    mask = torch.zeros_like(size, dtype=torch.bool)
    mask[size.topk(kept).indices] = True
    q = (x * (levels / x.abs().max())).round().to(torch.int32)
    return q * mask.repeat_interleave(lanes)

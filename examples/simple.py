"""The algorithm of policy `hybrid` on one page: sharded training with compressed collectives.

    torchrun --nproc-per-node 2 examples/simple.py

Every rank owns a shard of every parameter, as in FSDP2. A training step has three parts:

1. Parameters: every rank sends its shard to the others in 8 bits per element. All ranks compute
   with the decoded values. The owner's shard stays exact, and the optimizer works on it.
2. Forward and backward, in plain torch.
3. Gradients: every rank sends each owner the gradients of that owner's shard in 4 bits per element.
   The owner averages over the ranks. What 4 bits could not express, the sender keeps in a
   *residual* and adds to its next gradient (LoCo, arXiv 2407.04480).

Read `train_step` first, then `Unit`, `Segment` and the functions at the top. The library computes
the same bits (`tests/attach/test_one_page.py` checks that). It also overlaps exchanges with
compute, frees parameters between uses, takes other dtypes and sizes, and saves residuals.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 256  # neighbouring elements that share a scale
GRADIENT_BITS, PARAMETER_BITS = 4, 8
BETA = 0.8  # share of the old residual that stays
RESET_STEPS = 1024  # after so many steps the residual starts from zero
SMALL = 16384  # biases, norms and parameters with fewer elements are sent as float32


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """``[R, n]`` as a bfloat16 scale per block, ``[R, blocks, 1]``, and an integer code per element
    in float32, ``[R, blocks, BLOCK]``. ``codes * scales`` is close to ``x``, and exact in float32:
    a scale has 8 significant bits and a code has at most 8."""
    blocks = F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest_code = 2 ** (bits - 1) - 1
    scales = (blocks.abs().amax(-1, keepdim=True) * (1 / largest_code)).bfloat16()
    scales = torch.where(scales < 2.0**-126, 0, scales)  # the inverse may be infinite
    # A block with an element that is infinite or NaN arrives as NaN.
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = (blocks * (1 / scales.float())).clamp(-largest_code, largest_code).round()
    return scales, torch.where(scales > 0, codes, 0)


def pack(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    """A message ``[R, words]`` int32: two scales per word, then ``32 / bits`` codes per word. A
    block has ``m`` words of codes, and its element ``i`` is in word ``i % m``."""
    halves = F.pad(scales.squeeze(-1), (0, scales.shape[1] % 2))
    lanes = codes.int().unflatten(-1, (32 // bits, -1)) & (2**bits - 1)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
    words = (lanes << shifts).sum(-2, dtype=torch.int32)
    return torch.cat([halves.view(torch.int32), words.flatten(1)], dim=1)


def unpack(message: Tensor, n: int, bits: int) -> tuple[Tensor, Tensor]:
    """The scales and codes in a message about ``n`` elements, as `quantize` returned them."""
    blocks = -(-n // BLOCK)
    halves, words = message.tensor_split([-(-blocks // 2)], dim=1)
    scales = halves.contiguous().view(torch.bfloat16)[:, :blocks, None]
    shifts = torch.arange(32 - bits, -1, -bits, dtype=torch.int32)[:, None]
    lanes = words.unflatten(1, (blocks, 1, -1)) << shifts
    return scales, (lanes >> 32 - bits).flatten(2).float()  # this shift extends the sign


class Segment:
    """Neighbouring columns of a unit that are sent alike: quantized, in blocks that may span
    several parameters, with a residual row for each owner; or as float32."""

    def __init__(self, width: int, quantized: bool) -> None:
        self.width, self.quantized = width, quantized
        self.residual = torch.zeros(dist.get_world_size(), width, dtype=torch.bfloat16)

    def words(self, bits: int) -> int:
        blocks = -(-self.width // BLOCK)
        return -(-blocks // 2) + blocks * BLOCK * bits // 32 if self.quantized else self.width

    def encode(self, x: Tensor, bits: int, feedback: bool) -> Tensor:
        """Values ``[R, width]`` as messages ``[R, words]``."""
        if not self.quantized:
            return x.contiguous().view(torch.int32)
        residual = self.residual.float() if feedback else torch.zeros_like(x)
        x = x + residual
        scales, codes = quantize(x, bits)
        if feedback:
            left = x - (codes * scales).flatten(1)[:, : self.width]
            average = BETA * residual + (1 - BETA) * left
            # A block that arrives as NaN leaves its residual as it was.
            self.residual.copy_(torch.where(left.isnan(), residual, average))
        return pack(scales, codes, bits)

    def decode(self, message: Tensor, bits: int) -> Tensor:
        """Messages ``[R, words]`` as values ``[R, width]``."""
        if not self.quantized:
            return message.contiguous().view(torch.float32)
        scales, codes = unpack(message, self.width, bits)
        return (codes * scales).flatten(1)[:, : self.width]


class Unit:
    """Parameters that share a message, like those of one `fully_shard` call. A parameter viewed as
    ``[W, n]`` has rank ``r``'s shard in row ``r``. Side by side they are the unit, ``[W, S]``."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        rank, self.world_size = dist.get_rank(), dist.get_world_size()
        assert all(len(p) % self.world_size == 0 for p in params), "W must divide first dimensions"
        self.params = params
        self.shards = [nn.Parameter(p.data.chunk(self.world_size)[rank].clone()) for p in params]
        self.widths = [shard.numel() for shard in self.shards]
        self.segments = [
            Segment(sum(p.numel() for p in run) // self.world_size, quantized)
            for quantized, run in groupby(params, lambda p: p.ndim > 1 and p.numel() >= SMALL)
        ]
        self.steps = self.sent_bytes = self.float32_bytes = 0

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """All-gather: set the model's parameters to the shards of all ranks, after 8 bits. The
        exact shard stays with its owner, so nothing needs a residual."""
        shard = torch.cat([shard.flatten() for shard in self.shards])[None]
        message = self._encode(shard, PARAMETER_BITS, feedback=False)
        received = [torch.empty_like(message) for _ in range(self.world_size)]
        dist.all_gather(received, message)
        # A rank decodes its own shard, too: all ranks compute with the same bits.
        rows = self._decode(torch.cat(received), PARAMETER_BITS)
        for p, columns in zip(self.params, rows.split(self.widths, 1), strict=True):
            p.copy_(columns.reshape(p.shape))

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce-scatter: set the gradients of this rank's shards to the average over ranks."""
        for segment in self.segments if self.steps % RESET_STEPS == 0 else ():
            segment.residual.zero_()
        self.steps += 1
        grads = [p.grad for p in self.params if p.grad is not None]  # every parameter has one
        rows = torch.cat([grad.reshape(self.world_size, -1) for grad in grads], dim=1)
        message = self._encode(rows, GRADIENT_BITS, feedback=True)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message)  # row r goes to rank r
        total, *others = self._decode(received, GRADIENT_BITS).split(1)
        for row in others:  # in rank order: the order changes the bits of a float sum
            total = total + row
        averages = (total / self.world_size).split(self.widths, dim=1)
        for p, shard, average in zip(self.params, self.shards, averages, strict=True):
            shard.grad, p.grad = average.reshape(shard.shape), None

    def _encode(self, rows: Tensor, bits: int, feedback: bool) -> Tensor:
        columns = zip(self.segments, rows.split([s.width for s in self.segments], 1), strict=True)
        message = torch.cat([s.encode(x, bits, feedback) for s, x in columns], dim=1)
        self.sent_bytes += (self.world_size - 1) * message[0].nbytes
        self.float32_bytes += (self.world_size - 1) * rows[0].nbytes
        return message

    def _decode(self, received: Tensor, bits: int) -> Tensor:
        words = received.split([s.words(bits) for s in self.segments], dim=1)
        return torch.cat([s.decode(x, bits) for s, x in zip(self.segments, words, strict=True)], 1)


def train_step(units: Sequence[Unit], optimizer: torch.optim.Optimizer, loss: Callable) -> Tensor:
    """One step; the optimizer holds the shards of all units."""
    for unit in units:
        unit.gather_parameters()
    value = loss()
    value.backward()
    for unit in units:
        unit.reduce_gradients()
    optimizer.step()
    return value.detach()


def tiny_model() -> nn.Sequential:
    middle = (nn.LayerNorm(126), nn.Linear(126, 138, False), nn.ReLU(), nn.Linear(138, 126, False))
    return nn.Sequential(nn.Embedding(132, 126), nn.Sequential(*middle), nn.Linear(126, 132))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Every rank has its own tokens; token t is followed by 3 t + 1."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(132, (64,), generator=generator)
    return F.cross_entropy(model(tokens), (3 * tokens + 1) % 132)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks start with the same model
    model = tiny_model()
    units = [Unit([*model[1].parameters()]), Unit([*model[0].parameters(), *model[2].parameters()])]
    optimizer = torch.optim.Adam([shard for unit in units for shard in unit.shards], lr=1e-3)
    for step in range(100):
        loss = train_step(units, optimizer, lambda step=step: loss_of(model, step))
        if dist.get_rank() == 0 and step % 20 == 0:
            sent, dense = sum(u.sent_bytes for u in units), sum(u.float32_bytes for u in units)
            print(f"step {step}: loss {loss:.3f}, sent {sent:,} bytes, in float32 {dense:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

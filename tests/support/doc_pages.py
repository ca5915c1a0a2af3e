"""Run the Python of a page, with the names that its blocks assume."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import tagc
from support.markdown import Block, blocks
from support.paths import ROOT


def _block() -> nn.Module:
    layers = {"attn": nn.Linear(128, 128), "tanh": nn.Tanh(), "mlp": nn.Linear(128, 128)}
    return nn.Sequential(OrderedDict(layers))


def _model() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(_block(), _block())))
    return {"model": model, "hosts": 2, "ranks_per_host": 1}


def _sharded_model() -> dict[str, Any]:
    names = _model()
    model = names["model"]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def swap(model: nn.Module, others: list[Tensor]) -> None:
        for mine, other in zip(model.parameters(), others, strict=True):
            kept = mine.detach().clone()
            mine.copy_(other)
            other.copy_(kept)

    batch = torch.randn(4, 128)
    return names | {
        "optimizer": torch.optim.AdamW(model.parameters()),
        "micro_batches": [batch, batch],
        "loss": lambda y: y.square().mean(),
        "average": [p.detach().clone() for p in model.parameters()],
        "swap": swap,
        "evaluate": lambda model: model(batch),
    }


def _wrapped_model() -> dict[str, Any]:
    names = _sharded_model()
    tagc.wrap(names["model"], policy="hybrid")
    names["loss"](names["model"](names["micro_batches"][0])).backward()
    names["optimizer"].step()
    compressor = tagc.compressor(names["model"])
    loggers = {"step": 100, "wandb": mock.Mock(), "writer": mock.Mock()}
    return names | loggers | {"compressor": compressor, "old_scale": 1024.0, "new_scale": 512.0}


def _transports() -> dict[str, Any]:
    """The names of the file that gets the block, and a reducer's arguments for the next block."""
    from support.units import codec_plan
    from tagc.codecs.workspace import Workspace
    from tagc.collect import UnitReducer, transport
    from tagc.ops import get_ops

    device = torch.device("cpu")
    return dict(vars(transport)) | {
        "plan": codec_plan(dist.get_world_size(), {"kind": "quantized"}),
        "ops": get_ops(device, "reference"),
        "device": device,
        "workspace": Workspace(device),
        "seed": 7,
        "UnitReducer": UnitReducer,
    }


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "a model": _model,
    "a sharded model": _sharded_model,
    "a wrapped model": _wrapped_model,
    "a wrapped model and loggers": lambda: _wrapped_model() | {"rank": 0},
    "the names of tagc/collect/transport.py": _transports,
}


def run_page(rank: int, page: str, folder: str) -> str:
    """Run the Python blocks of a page on this rank, one after another; return their output.

    It runs in ``folder``. A YAML block whose first line is a comment with a file's name becomes
    that file there. If the paragraph before a block names a file of the library, the block becomes
    that module.

    Args:
        rank: this one, in the default group.
        page: the page's path in the repository.
        folder: an empty one, the same on all ranks.
    """
    found = blocks(ROOT / page)
    printed = io.StringIO()
    names: dict[str, Any] = {"tagc": tagc, "folder": "checkpoint", "__name__": "page", "rank": rank}
    with _surroundings(Path(folder), found), contextlib.redirect_stdout(printed):
        for block in found:
            if block.language == "python" and not block.not_run:
                if block.given:
                    names.update(GIVEN[block.given]())
                _run(block, names)
        for name, test in names.items():
            if name.startswith("test_"):
                test.body(rank, dist.get_world_size())
        _CHECKS.get(page, lambda names: None)(names)
    return printed.getvalue()


def _run(block: Block, names: dict[str, Any]) -> None:
    # There are other lines around those of a class, there is no GPU, and two steps are as many.
    source = textwrap.dedent(block.text).replace('"cuda"', '"cpu"').replace("range(20)", "range(2)")
    code = compile(source, block.where, "exec")
    name = _module_of(block)
    if name is None:
        exec(code, names)
        return
    module = sys.modules[name]
    exec(code, vars(module))
    names.update({k: v for k, v in vars(module).items() if not k.startswith("__")})


def _module_of(block: Block) -> str | None:
    """``tagc.codecs.float8``, where the text says that the block is this new file."""
    file = block.before.lstrip().removeprefix("`").partition("`")[0]
    new = file.startswith("tagc/") and file.endswith(".py") and not (ROOT / file).exists()
    return file.removesuffix(".py").replace("/", ".") if new else None


@contextlib.contextmanager
def _surroundings(folder: Path, found: list[Block]) -> Iterator[None]:
    """In ``folder``, with the page's files and modules, and a process group that is there."""
    for block in found:
        name = block.text.partition("\n")[0].removeprefix("# ")
        if block.language == "yaml" and name.endswith(".yaml"):
            (folder / name).write_text(block.text, encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
    modules = {name: ModuleType(name) for name in map(_module_of, found) if name is not None}
    modules["evenly"] = ModuleType("evenly")  # a library that does not exist
    vars(modules["evenly"])["Sharded"] = type("Sharded", (nn.Module,), {"reduce_hook": None})
    before = Path.cwd()
    sys.modules.update(modules)
    with contextlib.ExitStack() as stack:
        if dist.is_initialized():
            for name in ("init_process_group", "destroy_process_group"):
                stack.enter_context(mock.patch.object(dist, name))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            for name in modules:
                del sys.modules[name]


def _check_recipes(names: dict[str, Any]) -> None:
    """Loggers got numbers."""
    (logged,), _ = names["wandb"].log.call_args
    assert logged["tagc/steps"] > 0
    assert names["writer"].add_scalar.call_count == len(logged)


def _check_parts(names: dict[str, Any]) -> None:
    """The new codec loses nothing, and the new exchange gives the same result as the library's."""
    x = torch.randn(2, 1001)
    residual = torch.zeros(2, 1001, dtype=torch.float32)
    config, request = names["Float8Config"](), mock.Mock(columns=1001, feedback=None)
    plan = names["plan_float8"](config, request)
    message = torch.empty(2, plan.words, dtype=torch.int32)
    names["EncodeFloat8"]().run(x, residual, message)
    for row in range(2):
        out = torch.empty(1, 1001)
        names["SumFloat8"](1).run(message[row : row + 1], out)
        assert torch.equal(out[0] + residual[row], x[row])
    kind = importlib.import_module("tagc.codecs.plan").CodecKind
    kind("float8", names["Float8Plan"], names["plan_float8"], names["Float8Config"])

    from support.units import normal, reduce, unit_reducer

    buffers = normal(2, names["plan"].columns, step=0)
    rank = dist.get_rank()
    wanted = reduce(unit_reducer(names["plan"]), buffers[rank])
    assert torch.equal(reduce(names["reducer"], buffers[rank]), wanted)


_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/recipes.md": _check_recipes,
    "docs/extending.md": _check_parts,
}

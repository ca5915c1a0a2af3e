"""`tagc explain` and `tagc.explain`: the plan that `tagc.wrap` would make."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tagc
from support import parallel_net
from support.block_net import wrap
from support.distributed import as_on_nccl, on_ranks
from support.uneven_block import Block, sharded
from tagc.attach import ddp
from tagc.commands.cli import main
from tagc.costs.link import Link
from tagc.plan import format_bytes

BF16 = torch.bfloat16


def run(capsys: Any, *argv: str) -> str:
    assert main([*argv]) == 0
    return capsys.readouterr().out


class Net(nn.Module):
    """Sizes that no number of ranks divides, tied weights, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(301, 63)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(63, 301, bias=False)
        self.lm_head.weight = self.wte.weight
        self.get_parameter("layers.1.mlp.up_proj.weight").requires_grad_(False)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "policy", "hosts", "replicated"),
    [(4, "hybrid", 2, False), (3, "hosts", None, True)],
)
def test_explain_is_what_wrap_makes(
    rank: int, world_size: int, policy: str, hosts: int | None, replicated: bool
) -> None:
    how = {"ranks_per_host": hosts or 1, "ddp": replicated}
    with torch.device("meta"), patch.object(ddp, "UNIT_BYTES", 200_000):  # several units
        expected = tagc.explain(Net(), policy, world_size=world_size, **how)
    model: Any = Net()
    if replicated:
        model = DistributedDataParallel(model)
    else:
        sharded({}, model)
    # FSDP learns only in its first forward which module is the root.
    with as_on_nccl(), patch.object(ddp, "UNIT_BYTES", 200_000):
        wrapped = tagc.wrap(model, policy, hosts=hosts, ops="reference")
    plan = tagc.compressor(wrapped).plan()
    assert [u.info.name for u in plan.units] == [u.info.name for u in expected.units]
    assert len(plan.units) > 2
    # Only ranks know where they are.
    lines = [line for line in str(plan).splitlines() if not line.startswith("- hosts: ")]
    assert len(lines) == len(str(plan).splitlines()) - 1
    assert lines == str(expected).splitlines()
    assert plan.fingerprint == expected.fingerprint


@on_ranks(4)
def test_explain_after_tensor_parallelism(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    codec = {"kind": "quantized", "bits": 8, "block": 32}
    rules = [{"when": {"name": "mlp.*"}, "codec": codec}]
    policy = {"schema": 1, "gradients": rules, "parameters": rules}
    with patch.object(parallel_net, "fully_shard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units as small as these may send more when compressed
        plan = tagc.explain(parallel_net.parallel(2, 2, mesh=mesh), policy, world_size=2)
    model = wrap(parallel_net.parallel(2, 2, mesh=mesh, in_one_unit=True), policy)
    assert plan.fingerprint == tagc.compressor(model).plan().fingerprint
    assert plan.sent == tagc.compressor(model).plan().sent


def test_auto_keeps_no_messages_beside_packed_exponents() -> None:
    """Their sizes vary. Alone it would keep them, with so much memory on this link."""
    sizes = {"a": (512, 512), "b": (128, 128)}
    shapes = {f"layers.{i}.{name}": size for i in range(2) for name, size in sizes.items()}
    rules = [
        {"when": {"name": "*.b"}, "codec": {"kind": "exact", "keep_copy": False}},
        {"when": {}, "codec": {"kind": "auto", "memory": 2, "min_bits": 8}},
    ]
    dense = [{"when": {}, "codec": {"kind": "dense"}}]
    found = []
    for parameters in (rules, rules[1:]):
        policy = {"schema": 1, "gradients": dense, "parameters": parameters}
        plan = tagc.explain(
            shapes, policy, world_size=2, link=Link(bandwidth=1e6), parameter_dtype=BF16
        )
        found.append({s.codec.name for unit in plan.parameters for s in unit.segments})
    assert found == [{"quantized int8", "exact packed"}, {"quantized int8 kept"}]


EXACT = """
schema: 1
gradients:
  - when: {}
    codec: {kind: dense}
parameters:
  - when: {role: mlp}
    codec: {kind: exact}
"""


def test_exact_changes_depend_on_the_learning_rate(tmp_path: Path, capsys: Any) -> None:
    """The plan says what is expected and what is sent at most; memory is for the most."""
    file, shapes = tmp_path / "exact.yaml", tmp_path / "shapes.json"
    file.write_text(EXACT)
    shapes.write_text(json.dumps(SHAPES))
    command = ["explain", str(shapes), "--world", "4", "--policy", str(file), "--json"]
    elements = 2 * 3 * COLUMNS  # of both units, to three ranks
    most, buffers = 2 * elements, set()
    for given, bits in (([], 4.0), (["--learning-rate", "5.5e-5"], 1.42)):
        plan = json.loads(run(capsys, *command, *given))
        sent = plan["sent"]["parameters"]["wire_bytes"]
        assert sent == pytest.approx(elements * bits / 8, rel=0.03)
        buffers.add(plan["memory"]["buffers"])
        (note,) = (note for note in plan["notes"] if note.startswith("parameters: expected"))
        assert f"expected {format_bytes(sent)} per step, with {bits:.2g} bits for an " in note
        assert f"; at most {format_bytes(most)}" in note
    assert len(buffers) == 1

    with pytest.raises(ValueError, match="'hosts' does not depend on the learning rate"):
        tagc.explain(SHAPES, "hosts", world_size=4).at_learning_rate(1e-3)


COLUMNS = 1024 * 512 // 4
SHAPES = {f"layers.{i}.mlp.up_proj.weight": (1024, 512) for i in range(2)}


@pytest.mark.parametrize(
    ("policy", "hosts", "again"),
    [("hybrid", 1, (3, 3)), ("hosts", 2, (1, 1))],
)
def test_micro_batches(policy: str, hosts: int, again: tuple[int, int]) -> None:
    """What is sent in each backward is sent as often; changes of parameters, and what hosts send
    each other of gradients, once. Uncompressed, all is sent in each."""
    plans = [
        tagc.explain(SHAPES, policy, world_size=4, ranks_per_host=hosts, micro_batches=n)
        for n in (1, 3)
    ]
    for name, times in zip(("gradients", "parameters"), again, strict=True):
        (wire, dense), (later, later_dense) = (plan.sent[name] for plan in plans)
        assert (later, later_dense) == (times * wire, 3 * dense)
        rows = [row for row in plans[1].rows if row.direction == name]
        if rows:
            assert sum(row.wire_bytes for row in rows) == pytest.approx(later)
    assert "per step of 3 micro-batches instead of" in str(plans[1])
    assert ("set_requires_all_reduce(False)" in str(plans[1])) == (hosts > 1)
    with pytest.raises(ValueError, match="micro_batches must be 1 or more, not 0"):
        tagc.explain(SHAPES, policy, world_size=4, micro_batches=0)


def test_explain_refuses() -> None:
    with pytest.raises(tagc.PolicyError, match="needs a measured or a given link"):
        tagc.explain(SHAPES, "auto", world_size=4)
    with pytest.raises(ValueError, match="4 ranks do not divide among 3 replicas"):
        tagc.explain(SHAPES, "dense", world_size=4, replicas=3)
    with pytest.raises(tagc.PolicyError, match="has no section sites"):
        tagc.explain(SHAPES, "hybrid", world_size=4, sites=2)


def test_explain_warns_about_plans_of_sites_too() -> None:
    codec = {"kind": "quantized"}
    rules = [{"when": {"role": role}, "codec": codec} for role in ("embedding", "mlp")]
    policy = {"schema": 1, "sites": {"every": 4}, "gradients": rules}
    with pytest.warns(UserWarning, match=r"rule gradients\[0\] matches no parameter"):
        tagc.explain(SHAPES, policy, world_size=4, sites=2)


def test_explain_ddp_in_python() -> None:
    with pytest.raises(tagc.PolicyError, match=r"DDP and replicate\(\) all ranks are replicas"):
        tagc.explain(SHAPES, "loco-4bit", world_size=4, replicas=2, ddp=True)
    with pytest.raises(ValueError, match=r"is for sites, .* leave ddp out"):
        tagc.explain(SHAPES, "sites", world_size=4, sites=2, ddp=True)
    mixed = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512).bfloat16(), nn.LayerNorm(512))
    with pytest.raises(ValueError, match=r"of 2 dtypes \(torch.float32, torch.bfloat16\)"):
        tagc.explain(mixed, "loco-4bit", world_size=4, ddp=True)
    mixed[1].requires_grad_(False)
    plan = tagc.explain(mixed, "one-bit", world_size=4, ddp=True)
    assert [p.name for p in plan.units[0].info.params] == [
        *("0.weight", "0.bias", "2.weight", "2.bias")
    ]

"""Mutated policy files: clear errors, or exactly what they say; fixed seeds.

Nothing may crash, hang or be taken for something else than it says.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

import tagc
from support.mutation import SECONDS, by_count, mutated
from tagc.policy import Policy, PolicyError

EVERY_KEY = b"""\
schema: 1
about: every key of the schema
gradients:
  - when: {role: [attention, mlp], name: ["*.weight", "h.*"], layers: 0-11, min_numel: 10}
    codec: {kind: sketch, density: 0.25, symbol: auto, warmup_steps: 3}
    feedback: {kind: residual, dtype: bfloat16}
  - when: {layers: [1, 2], max_numel: 1000000}
    codec: {kind: quantized, bits: 4, block: 1024}
    feedback: {kind: average, beta: 0.75, reset_steps: 16}
  - when: {role: head}
    codec: {kind: auto, min_bits: 8}
  - when: {}
    codec: {kind: sketch, density: 1e-1, symbol: int16x2, support: own}
parameters:
  - when: {}
    codec: {kind: quantized, bits: 8, block: 32, keep_for_backward: true}
replicas:
  - when: {name: "*"}
    codec: {kind: dense, wire: bfloat16}
dimensions: {tp: {codec: {kind: quantized, bits: 8, block: 64}}, pp: {codec: {kind: quantized}}}
roles: {mlp: [proj.*, "*.w1"], head: final}
"""
SITES = b"""\
schema: 1
gradients:
  - when: {}
    codec: {kind: matrix, bits: 1}
sites:
  {every: 8, together: 5, fragments: 2, delay: 3, alpha: 0.5, outer: {rate: 0.7, momentum: 0.9}}
"""
WORDS = [
    *(b"roles ssm".split()),
    *(b"kind when codec feedback role name layers density bits sketch matrix dense auto".split()),
    *(b"0 1 -1 0.5 1e-3 1e400 .nan .inf 99999999999999999999 true no null ~ 0x10 1_0".split()),
    *(b"gradients parameters replicas shared own residual average none bfloat16".split()),
    *(b"&a *a !!python/object/apply:os.system !!binary << ? - : { } [ ] | > ' \" # \t".split(b" ")),
    *(b"\xff", b"\x00", b"\xe2\x80\xa8", b"\\ud800", b"\n", b"\n  ", b"{" * 40, b"[" * 2000),
]


def corpus() -> list[bytes]:
    """The built-in policies, and one with every key there is."""
    folder = resources.files("tagc.policies")
    return [*((folder / f"{name}.yaml").read_bytes() for name in tagc.policies()), EVERY_KEY, SITES]


def says(given: Any, meant: Any) -> bool:
    """Whether a part of a policy is what the file says, read by YAML's plainest reader: every
    scalar a string."""
    if isinstance(given, str) and given in ("", "~", "null", "Null", "NULL"):
        return True  # as good as left out
    if isinstance(meant, Mapping):
        return isinstance(given, dict) and all(
            key in meant and says(value, meant[key]) for key, value in given.items()
        )
    if isinstance(meant, tuple) and meant and isinstance(meant[0], Mapping):
        return isinstance(given, list) and len(given) == len(meant) and all(map(says, given, meant))
    if isinstance(meant, tuple) and meant and isinstance(meant[0], int):
        ends = [int(n) for n in re.findall(r"\d+", " ".join(given))] if given else []
        if isinstance(given, str):
            ends = [int(n) for n in re.findall(r"\d+", given)]
        return (ends[0], ends[-1]) == meant
    if isinstance(meant, tuple):
        return sorted({given} if isinstance(given, str) else set(given)) == list(meant)
    if isinstance(meant, bool):
        return given.lower() == str(meant).lower()
    if isinstance(meant, int | float):
        return float(given) == meant
    return given == meant


def test_what_a_policy_says():
    given = yaml.load(EVERY_KEY, yaml.BaseLoader)
    meant = Policy.load(yaml.safe_load(EVERY_KEY.replace(b"1e-1", b"0.1")))
    dumped = meant.model_dump(by_alias=True)
    assert says(given, dumped)
    changes = {"0.25": "0.5", "0.75": "0.7", "head": "mlp", "true": "false"}
    changes |= {"0-11": "0-12", "kind: auto": "kind: dense", "1e-1": "1", '"h.*"': '"i.*"'}
    for old, new in changes.items():
        assert old.encode() in EVERY_KEY
        changed = EVERY_KEY.replace(old.encode(), new.encode())
        assert not says(yaml.load(changed, yaml.BaseLoader), dumped), old


@by_count
def test_policies(count: int, tmp_path: Path) -> None:
    draw = random.Random(5)
    files, path = corpus(), tmp_path / "p.yaml"
    loaded = refused = 0
    for _ in range(count):
        content = mutated(draw.choice(files), WORDS, draw)
        path.write_bytes(content)
        start = time.monotonic()
        policy, lines = None, []
        try:
            policy = Policy.load(path)
        except PolicyError as error:
            lines = str(error).splitlines()
        if policy is None:
            refused += 1
            place = rf"{re.escape(str(path))}(:\d+:\d+)?: ."
            assert all(re.match(place, line) for line in lines), lines
        else:
            loaded += 1
            dumped = policy.model_dump(by_alias=True)
            assert says(yaml.load(content, yaml.BaseLoader), dumped), content
        assert time.monotonic() - start < SECONDS, content
    assert loaded > count / 20
    assert refused > count / 4

"""Mutated policy files are loaded, or refused with a clear error: none crashes or hangs."""

from __future__ import annotations

import random
import re
import time
from importlib import resources
from pathlib import Path

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
    return [*((folder / f"{name}.yaml").read_bytes() for name in tagc.policies()), EVERY_KEY]


@by_count
def test_policies(count: int, tmp_path: Path) -> None:
    draw = random.Random(5)
    files, path = corpus(), tmp_path / "p.yaml"
    loaded = refused = 0
    for _ in range(count):
        content = mutated(draw.choice(files), WORDS, draw)
        path.write_bytes(content)
        start = time.monotonic()
        try:
            Policy.load(path)
            loaded += 1
        except PolicyError as error:
            refused += 1
            lines = str(error).splitlines()
            place = rf"{re.escape(str(path))}(:\d+:\d+)?: ."
            assert all(re.match(place, line) for line in lines), lines
        assert time.monotonic() - start < SECONDS, content
    assert loaded > count / 20
    assert refused > count / 4

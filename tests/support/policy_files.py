"""A policy as a file, as one rule, and the errors of a file."""

from pathlib import Path

import pytest

from tagc.policy import Policy, PolicyError

BASE = """\
schema: 1
about: a test
gradients:
  - when: {role: attention}
    codec:
      kind: sketch
      density: 0.2
      symbol: int8x4
    feedback: {kind: residual, dtype: bfloat16}
  - when: {}
    codec: {kind: dense}
"""
BIG = (512, 512)
NO_DENSE = {"kind": "sketch", "density": 0.1}


def load_text(text: str | bytes, folder: Path) -> Policy:
    file = folder / "p.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Policy.load(file)


def one_rule(when: dict, **rest) -> Policy:
    return Policy.load({"schema": 1, "gradients": [{"when": when, "codec": NO_DENSE, **rest}]})


def errors(text: str | bytes, folder: Path) -> list[str]:
    """The lines of the error, each without the folder: `p.yaml:3:1: key: ...`."""
    with pytest.raises(PolicyError) as caught:
        load_text(text, folder)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{folder}/p.yaml:") for line in lines)
    return [line.removeprefix(f"{folder}/") for line in lines]

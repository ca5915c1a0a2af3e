"""The built wheel: what is in it, and that it imports from where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import tagc
from support.paths import ROOT

PROBE = """
import json, sys
import tagc, tagc.commands.cli, tagc.codecs.sketch, tagc.ops.cpu, tagc.ops.reference
import tagc.policies, tagc.triton_kernels
import tagc.benchmarks.suites, tagc.benchmarks.rank, tagc.benchmarks.kernels.operators
print(json.dumps({
    "files": [
        m.__file__
        for m in (tagc, tagc.ops.cpu, tagc.policies, tagc.triton_kernels, tagc.benchmarks.suites)
    ],
    "policies": tagc.policies(),
    "loads": [tagc.Policy.load(name).name for name in tagc.policies()],
    "version": tagc.__version__,
}), flush=True)
sys.exit(tagc.benchmarks.suites.main(["kernels", "--quick", "--list", "--device", "cpu"]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sources that git would see, built without the network."""
    # Built from a copy: setuptools leaves build/ and egg-info beside the sources, and picks up
    # what an earlier build left in build/.
    source = tmp_path_factory.mktemp("source")
    for name in ("tagc", "policies", "triton_kernels", "benchmarks"):
        for file in (ROOT / name).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                copy = source / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        (source / name).write_bytes((ROOT / name).read_bytes())

    out = tmp_path_factory.mktemp("wheel")
    command = ["build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    run(sys.executable, "-m", *command)
    (built,) = out.glob("*.whl")
    return built


def run(*command: str, cwd: Path | None = None) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_every_source(wheel: Path) -> None:
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {"tagc/py.typed"}
    for folder, package in (
        ("tagc", "tagc"),
        ("policies", "tagc/policies"),
        ("triton_kernels", "tagc/triton_kernels"),
        ("benchmarks", "tagc/benchmarks"),
    ):
        for pattern in ("*.py", "*.yaml", "*.schema.json"):
            for file in (ROOT / folder).rglob(pattern):
                expected.add(f"{package}/{file.relative_to(ROOT / folder).as_posix()}")
    # These train the models of the repository's examples.
    here_only = tuple(f"tagc/benchmarks/{name}/" for name in ("dimensions", "network", "quality"))
    assert held == {name for name in expected if not name.startswith(here_only)}
    assert {Path(n).stem for n in held if n.endswith(".yaml")} == set(tagc.policies())


@pytest.mark.xdist_group("wheel")
def test_the_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(target)  # as pip does with a wheel of plain files
    # Isolated from the working directory; the path goes before the editable install's.
    probe = f"import sys; sys.path.insert(0, {str(target)!r})\n{PROBE}"
    line, *listed = run(sys.executable, "-c", probe, cwd=tmp_path).splitlines()
    found = json.loads(line)
    assert all(Path(file).is_relative_to(target) for file in found["files"]), found["files"]
    assert found["policies"] == tagc.policies()
    assert found["loads"] == list(tagc.policies())
    assert found["version"] == tagc.__version__
    # `tagc bench` from the wheel alone: the suite, its command line, and which cases there are.
    assert any("encode/2^20" in case for case in listed)


def test_public_names() -> None:
    assert tagc.__all__ == [
        "Compressor",
        "CountSketch",
        "Decoded",
        "KernelError",
        "Policy",
        "PolicyError",
        "Sites",
        "SitesLostError",
        "Sketch",
        "StateError",
        "__version__",
        "activations",
        "compress_activations",
        "compressor",
        "dimension_options",
        "explain",
        "init_device_mesh",
        "policies",
        "sites",
        "wrap",
    ]
    assert all(hasattr(tagc, name) for name in tagc.__all__)


def test_policies_stays_callable_when_imported_as_a_module() -> None:
    before = tagc.policies()
    module: Any = importlib.import_module("tagc.policies")
    assert sys.modules["tagc.policies"] is module
    assert tagc.policies() == before == module()
    assert {"attn-only", "dense", "hybrid"} <= set(before)

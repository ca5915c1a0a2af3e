"""Of all sources: imports go downwards, from room to room as `ROOMS` says, and in no circle
anywhere; and no tensor has a dtype or a device by default, as users may change both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the ground up: a room imports from those before it, and from itself.
ROOMS = (
    "basics",
    "ops",
    "triton_kernels",
    "selfcheck",
    "codecs",
    "policy",
    "policies",
    "plan",
    "collect",
    "groups",
    "attach",
    "checkpoint",
    "costs",
    "handle",
    "site",
    "integrations",
    "tagc",  # the package's own face
    "commands",
    "benchmarks",
)
# Where the packages' folders stand in the repository.
FOLDERS = {
    "tagc": ROOT / "tagc",
    "tagc.triton_kernels": ROOT / "triton_kernels",
    "tagc.policies": ROOT / "policies",
    "tagc.benchmarks": ROOT / "benchmarks",
}


def sources() -> dict[str, Path]:
    """Every module of the package, as it is installed, and its file."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found[name] = file
    return found


MODULES = sources()


def imports(name: str) -> Iterator[str]:
    """The modules of the package that a module names in any import: in functions and for type
    checkers, too, and by `import_module` with a plain string."""
    for found in _named(name):
        # In the repository the benchmarks are run from their own folder.
        full = f"tagc.{found}" if found.startswith("benchmarks.") else found
        if full in MODULES:
            yield full


def _named(name: str) -> Iterator[str]:
    """Everything that may be the name of a module in a module's imports."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            of_modules = [n for n in names if n in MODULES or f"tagc.{n}" in MODULES]
            yield from of_modules
            # The package itself is meant where it has the name, and no module of its does.
            if len(of_modules) < len(names):
                yield base
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else "tagc"


# What is imported only when it is asked for, upwards: `tagc bench`.
LATE = {("tagc.commands.commands", "tagc.benchmarks.suites")}


@cache
def graph() -> dict[str, list[str]]:
    """What every module imports."""
    return {name: sorted(set(imports(name))) for name in MODULES}


def test_every_module_has_a_room() -> None:
    assert {room(name) for name in MODULES} == set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_imports_go_downwards(name: str) -> None:
    floor = ROOMS.index(name)
    upwards = [
        f"{module} imports {other}"
        for module in MODULES
        if room(module) == name
        for other in graph()[module]
        if ROOMS.index(room(other)) > floor and (module, other) not in LATE
    ]
    assert not upwards


def test_no_import_is_in_a_circle() -> None:
    """Among files; a package's face imports from its files, and they may not import the face."""
    others = {name: {*found} - {name} for name, found in graph().items()}
    TopologicalSorter(others).prepare()  # names the circle


# Functions of torch whose result has the default dtype, or is on the default device, unless they
# are told another.
DTYPED = {
    *("zeros", "ones", "empty", "full", "tensor", "rand", "randn", "linspace", "logspace"),
    *("eye", "as_tensor", "asarray", "scalar_tensor", "empty_strided", "empty_permuted", "normal"),
}
PLACED = DTYPED | {"arange", "range", "randint", "randperm", "tril_indices", "triu_indices"}


def without(keyword: str, functions: set[str], source: str) -> list[int]:
    """Lines of calls of these functions of torch that do not give this keyword."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in functions
        and not any(given.arg == keyword for given in node.keywords)
    ]


def test_every_factory_call_names_a_dtype_and_a_device() -> None:
    found = {
        str(file.relative_to(ROOT)): (
            without("dtype", DTYPED, file.read_text()),
            without("device", PLACED | {"Generator"}, file.read_text()),
        )
        for name, file in MODULES.items()
        if room(name) != "benchmarks"
    }
    assert not {file: lines for file, lines in found.items() if any(lines)}

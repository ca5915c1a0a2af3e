"""How often a launch executes each statement of its kernel, and what each accesses in memory.

The kernel's Python function runs, for a few programs of the grid at the size that is asked for,
with a stand-in for ``triton.language`` (:mod:`.language`): loops and branches that depend on
program numbers and sizes go as they would; a branch that depends on what is in memory is taken,
unless all that it does is leave the kernel or its line says that it is ``# seldom`` taken; and a
loop that nothing else ends is run once. A loop over the set bits of words is run as often as the
fullest word is expected to have bits. Hints say what counters in memory hold, and results what
device functions return. Scalar control flow is the only one that Triton has, so what is
counted for a program holds for each of its warps.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..compiled import Launch
from .language import Access, Call, Hint, Language, Result
from .lines import name_of, places
from .sass import Chain
from .values import Pointer, Value, ask_chances, value

# How often the programs of a launch are halved at most.
_HALVED = 6
# The most turns of a loop of which all are followed where each depends on the last.
_WHOLE = 64


@dataclass
class Followed:
    """Of a whole launch.

    Attributes:
        executions: of every statement, by its chain, in all programs.
        accesses: each with how often it is made.
    """

    executions: dict[Chain, float] = field(default_factory=dict)
    accesses: list[tuple[Access, float]] = field(default_factory=list)


def follow(
    launch: Launch, hints: Mapping[str, Hint], results: Mapping[str, Result] | None = None
) -> Followed:
    """Follow some programs of a launch, each for its share of all.

    The first axis is halved where the programs at its ends do not execute the same, the longest
    part first, until there are enough of them; in between, half are taken to be as at either end.
    """
    X, Y, Z = launch.grid
    ran: dict[int, tuple[dict[Chain, float], list[tuple[Access, float]]]] = {}

    def run(x: int) -> dict[Chain, float]:
        if x not in ran:
            ran[x] = _program(launch, (x, Y // 2, Z // 2), hints, results or {})
        return ran[x][0]

    # The first and the last program often have more to do than all between.
    ends = sorted({0, min(1, X - 1), X // 2, max(0, X - 2), X - 1})
    parts = list(itertools.pairwise(ends))
    for _ in range(_HALVED):
        differ = [(b - a, a, b) for a, b in parts if b - a > 1 and run(a) != run(b)]
        if not differ:
            break
        _, a, b = max(differ)
        parts.remove((a, b))
        parts += [(a, (a + b) // 2), ((a + b) // 2, b)]
    weights: defaultdict[int, float] = defaultdict(float)
    for x in (0, X - 1):
        weights[x] += 0.5
    for a, b in parts:
        weights[a] += (b - a) / 2
        weights[b] += (b - a) / 2
    found = Followed()
    for x, weight in weights.items():
        run(x)
        executions, accesses = ran[x]
        for chain, times in executions.items():
            before = found.executions.get(chain, 0.0)
            found.executions[chain] = before + times * weight * Y * Z
        found.accesses += [(access, times * weight * Y * Z) for access, times in accesses]
    return found


def _program(
    launch: Launch,
    program: tuple[int, int, int],
    hints: Mapping[str, Hint],
    results: Mapping[str, Result],
) -> tuple[dict[Chain, float], list[tuple[Access, float]]]:
    accesses: list[tuple[Access, float]] = []

    def note(access: Access, times: float) -> None:
        accesses.append((access, times))

    name = launch.function.__name__
    # What is said of one kernel's argument goes before what is said of all of that name.
    here = {k: v for k, v in hints.items() if "." not in k}
    here |= {k.partition(".")[2]: v for k, v in hints.items() if k.partition(".")[0] == name}
    language = Language(program, launch.grid, here, note)
    # Whoever stashes does as much in a turn as earlier ones have left.
    if "stash" in launch.arguments:
        language.whole = _WHOLE
    known = _known(launch, program[0], results)
    kernel = _bound(launch.function, language, {}, known)
    constants = _constants(launch.function)
    arguments = {
        name: _argument(name, x, name in constants) for name, x in launch.arguments.items()
    }
    ask_chances(language.goes_on)
    tracer = _Tracer(language)
    before = sys.gettrace()
    sys.settrace(tracer.call)
    try:
        kernel(**arguments)
    finally:
        sys.settrace(before)
    return tracer.executions(), accesses


def _known(
    launch: Launch, program: int, results: Mapping[str, Result]
) -> dict[str, Callable[[tuple[Any, ...], Any], Any]]:
    """What is said of this kernel's device functions, to be called with arguments and result."""
    kernel = launch.function.__name__
    before: Counter[str] = Counter()

    def made(name: str, result: Result) -> Callable[[tuple[Any, ...], Any], Any]:
        def known(arguments: tuple[Any, ...], found: Any) -> Any:
            call = Call(
                kernel=kernel, scalars=launch.arguments, program=program, before=before[name],
                arguments=arguments, result=found,
            )  # fmt: skip
            before[name] += 1
            return result(call)

        return known

    here: dict[str, Callable[[tuple[Any, ...], Any], Any]] = {"popcount": _popcount}
    for name, result in results.items():
        owner, _, function = name.partition(".")
        if owner == kernel:
            here[function] = made(function, result)
    return here


def _popcount(arguments: tuple[Any, ...], found: Value) -> Value:
    word = arguments[0]
    if word.bits is None or word.less:
        return found
    return replace(found, bits=word.bits, counted=True, share=word.share)


def _constants(function: Any) -> set[str]:
    return {p.name for p in function.params if p.is_constexpr}


def _argument(name: str, x: Any, constant: bool) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(name, x, _element(x.dtype))
    return x if constant or x is None else value(x)


def _element(dtype: torch.dtype) -> Any:
    import triton.language as tl

    names = {
        torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16",
        torch.float16: "float16", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
        torch.int64: "int64", torch.uint8: "uint8", torch.bool: "int1",
    }  # fmt: skip
    return getattr(tl, names[dtype])


def _bound(
    function: Any,
    language: Language,
    made: dict[int, Any],
    known: Mapping[str, Callable[[tuple[Any, ...], Any], Any]],
) -> Any:
    """The function that Triton would compile, and all that it calls, in our language."""
    python = function.fn
    if id(python) in made:
        return made[id(python)]
    scope: dict[str, Any] = {}
    bound = types.FunctionType(
        python.__code__, scope, python.__name__, python.__defaults__, python.__closure__
    )
    bound.__kwdefaults__ = python.__kwdefaults__
    made[id(python)] = called = bound
    if python.__name__ in known:

        def called(*arguments: Any, **more: Any) -> Any:
            return known[python.__name__](arguments, bound(*arguments, **more))

        made[id(python)] = called
    from triton.language import constexpr

    tl = language.namespace()
    for name, x in python.__globals__.items():
        if name == "tl":
            scope[name] = tl
        elif hasattr(x, "fn") and hasattr(x, "arg_names"):
            if name in python.__code__.co_names:
                scope[name] = _bound(x, language, made, known)
        elif isinstance(x, constexpr):
            scope[name] = x.value
        else:
            scope[name] = x
    scope["range"] = language._range
    scope[_OURS] = True
    return called


# What the scope of a kernel has, and no other.
_OURS = "__kernel__"


class _Tracer:
    """Counts the statements of kernels that Python executes."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._counts: dict[tuple[Chain, tuple[int, ...]], float] = defaultdict(float)
        self._stack: list[Any] = []
        # The statement that each frame is at.
        self._at: list[tuple[str, int]] = []

    def call(self, frame: Any, event: str, _: Any) -> Any:
        if _OURS not in frame.f_globals:
            return None
        self._stack.append(frame)
        self._at.append((name_of(frame.f_code.co_filename), -1))
        return self._local

    def _local(self, frame: Any, event: str, _: Any) -> Any:
        if event == "return":
            self._stack.pop()
            self._at.pop()
        elif event == "line":
            file = frame.f_code.co_filename
            place = places(file).get(frame.f_lineno)
            if place is None:
                return self._local
            at = (name_of(file), place.line)
            if place.head:
                # Counted with the body; but the next execution of the body's first line is new.
                self._at[-1] = (at[0], -1)
            elif at != self._at[-1]:
                self._at[-1] = at
                key = (tuple(self._at), tuple(self._language.turns))
                self._counts[key] += self._language.weight
        return self._local

    def executions(self) -> dict[Chain, float]:
        """Of what is unrolled, of the turn that is executed most: each is code of its own."""
        found: dict[Chain, float] = {}
        for (chain, _), times in self._counts.items():
            found[chain] = max(found.get(chain, 0.0), times)
        return found

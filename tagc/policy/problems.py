"""Saying what is wrong with a policy, in the words of its file."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tagc.policy.document import Document, Keys, Place, PolicyError, Problem
from tagc.policy.removed import remedy_for
from tagc.policy.suggest import closest, nearest, short

__all__ = ["raise_problems", "translate"]


def raise_problems(document: Document, problems: Iterable[Problem]) -> None:
    """Raises one PolicyError that lists all problems, the reader's own too, by line.

    What lies under a value that the reader refused is left out: it would only repeat the cause.
    """
    refused = set(document.refused)
    listed = document.problems + [
        problem
        for problem in problems
        if not any(problem.path[:end] in refused for end in range(len(problem.path) + 1))
    ]
    if listed:
        listed.sort(key=lambda problem: _place_of(problem, document) or Place(0, 0))
        raise PolicyError("\n".join(_sentence(problem, document) for problem in listed))


def translate(
    error: ValidationError, data: object, keys_at: Callable[[Keys], Sequence[str]]
) -> list[Problem]:
    """Pydantic's findings on `data` as problems, in the words of the file.

    `keys_at(loc)` gives the keys allowed in the mapping at pydantic's location `loc`.
    """
    found = error.errors(include_url=False)
    # A misspelt key is one mistake, though the right one is then missing.
    meant = {
        (*details["loc"][:-1], closest(details["loc"][-1], keys_at(details["loc"][:-1])))
        for details in found
        if details["type"] == "extra_forbidden"
    }
    return [
        _removed(Problem(*_translate_one(details, data, keys_at)), data)
        for details in found
        if details["type"] != "missing" or details["loc"] not in meant
    ]


def _removed(problem: Problem, data: Any) -> Problem:
    """The problem, or what to write instead if the value was allowed in an earlier version."""
    for part in problem.path[:-1]:
        data = data[part]
    key = problem.path[-1] if problem.path else None
    if not isinstance(data, Mapping) or not isinstance(key, str) or key not in data:
        return problem
    remedy = remedy_for(key, data)
    return replace(problem, text=f"{short(data[key])} was removed: {remedy}") if remedy else problem


def _translate_one(
    details: ErrorDetails, data: object, keys_at: Callable[[Keys], Sequence[str]]
) -> tuple[Keys, str]:
    loc, kind, context = details["loc"], details["type"], details.get("ctx", {})
    if loc[-1:] == ("[key]",) and kind == "literal_error":
        return _path_in(data, loc, missing=False), (
            f"unknown key; {nearest(loc[-2], _options(context['expected']))}"
        )
    path = _path_in(data, loc, missing=kind == "missing")
    given = short(details["input"])
    if kind == "missing":
        return path, "the key is missing"
    if kind == "extra_forbidden":
        return path, f"unknown key; {nearest(loc[-1], keys_at(loc[:-1]))}"
    if kind == "union_tag_not_found":
        return (*path, "kind"), "the key is missing"
    if kind == "union_tag_invalid":
        tag = details["input"].get("kind")
        return (*path, "kind"), _unknown(tag, context["expected_tags"])
    if kind == "literal_error":
        return path, _unknown(details["input"], context["expected"])
    if kind in ("model_type", "model_attributes_type"):
        if not path:  # some other text than a policy, which is none of this message's business
            given = type(details["input"]).__name__
        return path, f"must be a mapping, not {given}"
    if kind == "value_error":
        return path, str(context["error"])
    return path, re.sub(r"^(?:Input|String) should", "must", details["msg"]) + f", not {given}"


def _path_in(data: object, loc: Keys, *, missing: bool) -> Keys:
    """The part of pydantic's location that exists in the data, plus the key if it is missing."""
    # After a codec, pydantic names the kind that it chose, which is no key of the file.
    if len(loc) > 3 and loc[2] == "codec":
        loc = loc[:3] + loc[4:]
    path: Keys = ()
    for part in loc:
        found: Sequence[Any] = ()
        if isinstance(data, list | tuple) and isinstance(part, int):
            found = data[part : part + 1]
        elif isinstance(data, Mapping) and part in data:
            found = (data[part],)
        if not found:
            return (*path, part) if missing else path
        data = found[0]
        path = (*path, part)
    return path


def _unknown(given: object, expected: str) -> str:
    return f"unknown value {short(given)}; {nearest(given, _options(expected))}"


def _options(expected: str) -> list[str]:
    # Pydantic lists what it expects as text, each spelling in single quotes, numbers without.
    return re.findall(r"'([^']*)'", expected) or re.findall(r"\d+", expected)


def _sentence(problem: Problem, document: Document) -> str:
    place = _place_of(problem, document)
    where = document.source if place is None else f"{document.source}:{place}"
    return ": ".join(part for part in (where, _spell(problem.path), problem.text) if part)


def _place_of(problem: Problem, document: Document) -> Place | None:
    path = problem.path
    while path and path not in document.places:
        path = path[:-1]
    return problem.place or document.places.get(path)


def _spell(path: Keys) -> str:
    """`("gradients", 0, "codec")` as `gradients[0].codec`."""
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            spelled += ("." if spelled else "") + (
                part if re.fullmatch(r"[\w-]+", part) else short(part)
            )
    return spelled

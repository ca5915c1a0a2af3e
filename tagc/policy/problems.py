"""Reports what is wrong with a policy in the terms of its file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tagc.policy.document import Document, Keys, Place, PolicyError, Problem
from tagc.policy.roles import ROLES
from tagc.policy.suggest import closest, nearest, remedy_for, short


def raise_problems(document: Document, problems: Iterable[Problem]) -> None:
    """Raise one PolicyError that lists all problems by line, including the reader's.

    Problems below a value that the reader refused are left out: they would only repeat the cause.
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


def translate(error: ValidationError, data: object, model: type[BaseModel]) -> list[Problem]:
    """Pydantic's errors on `data` as problems, in the terms of the file.

    `model` has every key of a file; allowed keys and values are read from it.
    """
    found = error.errors(include_url=False)
    # A misspelt key is one mistake, although the right key is then missing.
    meant = {
        (*loc, closest(key, _keys(model, loc)))
        for *loc, key in (one["loc"] for one in found if one["type"] == "extra_forbidden")
    }
    return [
        _in_words(Problem(*_translate_one(details, model)), data)
        for details in found
        if details["type"] != "missing" or details["loc"] not in meant
    ]


def _in_words(problem: Problem, data: Any) -> Problem:
    """The problem at its place in the file; for a removed value, it says what to write instead."""
    *outer, key = problem.path or (None,)
    for part in outer:
        data = data[part]
    if isinstance(data, str):  # one alternative, without a list around it
        return replace(problem, path=tuple(outer))
    remedy = remedy_for(key, data) if isinstance(data, Mapping) and key in data else None
    return replace(problem, text=f"{short(data[key])} was removed: {remedy}") if remedy else problem


# By pydantic's type of error, where its own text does not fit a file.
_TEXTS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "invalid_key": "a key must be a string",
    "model_attributes_type": "must be a mapping",
    "model_type": "must be a mapping",
}


def _translate_one(details: ErrorDetails, model: type[BaseModel]) -> tuple[Keys, str]:
    loc, kind, given = details["loc"], details["type"], details["input"]
    path, expected = _follow(model, loc)
    if kind in ("missing", "union_tag_not_found"):
        return (path if kind == "missing" else (*path, "kind")), "the key is missing"
    if kind == "extra_forbidden":
        return path, f"unknown key; {nearest(loc[-1], _keys(model, loc[:-1]))}"
    if kind == "union_tag_invalid":
        return (*path, "kind"), _unknown(given["kind"], [*map(_kind, expected)])
    if kind == "literal_error" and loc[-1] == "[key]":  # only `roles` has it
        return path, f"unknown key; {nearest(given, ROLES)}"
    if kind == "literal_error":
        values = [v for one in expected if get_origin(one) is Literal for v in get_args(one)]
        return path, _unknown(given, values)
    if kind == "value_error":
        return path, str(details.get("ctx", {})["error"])
    text = _TEXTS.get(kind) or re.sub("^(Input|String) should ", "must ", details["msg"])
    # A value that is the whole file is some other text, not a policy: name only its type.
    return path, f"{text}, not {short(given) if path else type(given).__name__}"


def _unknown(given: object, options: Sequence[object]) -> str:
    return f"unknown value {short(given)}; {nearest(given, options)}"


def _follow(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[Keys, list[Any]]:
    """The path in the file of pydantic's location, and the types that a value may have there.

    Besides keys and indices, a location names alternatives: the `kind` of a codec, a union's types.
    """
    path: Keys = ()
    types: list[Any] = [model]
    for part in loc:
        fields, origin = _fields(types[0]), get_origin(types[0])
        if fields and len(types) > 1:
            types = [codec for codec in types if _kind(codec) == part]
        elif fields or origin is dict or (origin is tuple and isinstance(part, int)):
            path = (*path, part)
            inner = fields.get(part) if fields else get_args(types[0])[origin is dict]
            types = _alternatives(inner)
    return path, types


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [one for arg in get_args(annotation) for one in _alternatives(arg)]
    return [] if annotation is NoneType else [annotation]


def _fields(part: Any) -> dict[Any, Any]:
    """The types of a part of a policy by key; empty for a value."""
    fields = getattr(part, "model_fields", {})
    return {info.alias or name: info.annotation for name, info in fields.items()}


def _keys(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    return [*_fields(_follow(model, loc)[1][0])]


def _kind(codec: type[BaseModel]) -> str:
    return codec.model_fields["kind"].default


def _sentence(problem: Problem, document: Document) -> str:
    place = _place_of(problem, document)
    where = document.source if place is None else f"{document.source}:{place}"
    return ": ".join(part for part in (where, _key(problem.path), problem.text) if part)


def _place_of(problem: Problem, document: Document) -> Place | None:
    path = problem.path
    while path and path not in document.places:
        path = path[:-1]
    return problem.place or document.places.get(path)


def _key(path: Keys) -> str:
    """`("gradients", 0, "codec")` as `gradients[0].codec`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if re.fullmatch(r"[\w-]+", part) else short(part)
            text += f".{name}" if text else name
    return text

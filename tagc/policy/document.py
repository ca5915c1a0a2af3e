"""Reads a policy file with the place of every key, and reports what is wrong in terms of the file.

This file knows YAML; `tagc.policy.policy` knows what a policy may contain.
"""

import difflib
import importlib.resources
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tagc.basics.files import read_regular
from tagc.policy.roles import ROLES

Keys = tuple[str | int, ...]

_LARGEST = 1_000_000  # bytes of a policy file

DICT = "<dict>"
"""Source of a policy that is not from a file."""


class PolicyError(ValueError):
    """A policy that cannot be used. One line per problem: `file:line:column: key.path: what is
    wrong`."""


class Place(NamedTuple):
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """A problem at a path. `place` is given if it differs from the place of the path's key;
    `hides` says whether the value was left out, so that problems below it only repeat the cause."""

    path: Keys
    text: str
    place: Place | None = None
    hides: bool = False


@dataclass(kw_only=True)
class Document:
    source: str
    data: object
    text: str = ""  # the content of the file
    path: str | None = None  # the file's real path; None for a built-in policy
    # The place of each key and list item, by path; empty for data not from a file.
    places: dict[Keys, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)  # what the reader refused


def read(source: "str | os.PathLike[str] | Mapping[str, Any]") -> Document:
    """The document of a built-in name, a path or a mapping; PolicyError if it is none of these."""
    if isinstance(source, Mapping):
        return Document(source=DICT, data=dict(source))
    if isinstance(source, os.PathLike) or (isinstance(source, str) and is_path(source)):
        return read_file(os.fsdecode(source))
    if isinstance(source, str):
        return read_builtin(source)
    raise PolicyError(
        f"a policy is a built-in name, a path or a mapping, not {type(source).__name__}"
    )


def builtin_names() -> list[str]:
    """The names of the policies that the package ships, sorted."""
    files = importlib.resources.files("tagc.policies").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_builtin(name: str) -> Document:
    names = builtin_names()
    if name not in names:
        raise PolicyError(f"no built-in policy {name!r}; {nearest(name, names)}")
    file = importlib.resources.files("tagc.policies") / f"{name}.yaml"
    return parse(file.read_bytes(), f"tagc/policies/{name}.yaml")


def is_path(source: str) -> bool:
    """Whether a string is the path of a file, not the name of a built-in policy."""
    return source.endswith((".yaml", ".yml")) or any(
        separator in source for separator in (os.sep, os.altsep) if separator
    )


def read_file(path: str) -> Document:
    """The document in a file. Raises PolicyError as `parse` does, or if it cannot be read."""
    try:
        raw = read_regular(path, _LARGEST)
    except OSError as error:
        name = path if path.isprintable() else repr(path)
        raise PolicyError(f"{name}: cannot be read: {error.strerror or error}") from None
    document = parse(raw, path)
    document.path = os.path.realpath(path)
    return document


def parse(raw: bytes, source: str) -> Document:
    """Read one YAML document in UTF-8; PolicyError if it is not that.

    Scalars follow the core schema of YAML 1.2: `1e-3` is a number, `no` and `1:30` are strings.
    Duplicate keys, aliases and tags other than the core ones are collected as problems.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        place = _place_in(raw[: error.start].decode(), error.start)
        raise PolicyError(f"{source}:{place}: not UTF-8 text ({error.reason})") from None
    document = Document(source=source, data=None, text=text)
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            document.data = _plain(root, (), document)
    # PyYAML also lets errors of Python through, such as chr()'s for an escape beyond Unicode.
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        place = _error_place(error, loader, text)
        raise PolicyError(f"{source}:{place}: invalid YAML: {_error_text(error)}") from None
    if root is None:
        raise PolicyError(f"{source}: the file is empty; a policy needs 'schema' and 'gradients'")
    return document


_ALIAS = "alias"
_CORE = "tag:yaml.org,2002:"
_QUOTE = "quote a glob that starts with '*'"


class _Loader(yaml.SafeLoader):
    """Composes nodes only, and turns aliases into marked scalars, so that errors have a line."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            return yaml.ScalarNode(_ALIAS, event.anchor, event.start_mark, event.end_mark)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    "null": r"(?:~|null|Null|NULL|)\Z",
    "bool": r"(?:true|True|TRUE|false|False|FALSE)\Z",
    "int": r"[-+]?[0-9]+\Z",
    "float": r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z",
}.items():
    _Loader.add_implicit_resolver(_CORE + _tag, re.compile(_pattern), None)

_SCALARS: dict[str, Callable[[str], object]] = {
    _CORE + "null": lambda text: None,
    _CORE + "bool": lambda text: text.lower() == "true",
    _CORE + "int": int,
    # Python's spelling has no dot in .inf and .nan.
    _CORE + "float": lambda text: float(re.sub(r"^([-+]?)\.(?=[a-zA-Z])", r"\1", text)),
    _CORE + "str": str,
}


def _plain(node: yaml.Node, path: Keys, document: Document) -> object:
    document.places.setdefault(path, _place_of(node.start_mark))
    if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
        return _plain_mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
        return [_plain(item, (*path, i), document) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        try:
            node.value.encode()  # an escape can spell half a surrogate pair
            return _SCALARS[node.tag](node.value)
        except ValueError:
            what = f"{short(node.value)} is not a valid {node.tag.removeprefix(_CORE)}"
    elif node.tag == _ALIAS:
        what = f"YAML aliases such as *{node.value} are not supported; {_QUOTE}"
    else:
        what = f"the YAML tag {short(node.tag)} is not supported"
    document.problems.append(Problem(path, what, hides=True))
    return None


def _plain_mapping(node: yaml.MappingNode, path: Keys, document: Document) -> dict[str, object]:
    data: dict[str, object] = {}
    for key_node, value_node in node.value:
        place = _place_of(key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _CORE + "str":
            document.problems.append(Problem(path, "a key is not a string", place))
            continue
        key = key_node.value
        here = (*path, key)
        if key in data:
            what = f"duplicate key, first on line {document.places[here].line}"
            document.problems.append(Problem(here, what, place))
            continue
        document.places[here] = place
        data[key] = _plain(value_node, here, document)
    return data


def _error_place(error: Exception, loader: _Loader | None, text: str) -> Place:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return _place_of(mark)
    if isinstance(error, yaml.reader.ReaderError):
        return _place_in(text, error.position)
    return _place_of(loader.get_mark()) if loader else Place(1, 1)


def _place_of(mark: yaml.Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _place_in(text: str, position: int) -> Place:
    before = text[:position]
    return Place(before.count("\n") + 1, len(before) - before.rfind("\n"))


def _error_text(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        what = ", ".join(part for part in (error.context, error.problem) if part)
        return f"{what}; {_QUOTE}" if "alias" in what else what
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character U+{error.character:04X} is not allowed"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split())


def closest(given: object, options: Sequence[object]) -> str | None:
    """The option whose text is closest to `given`; None if no option is similar."""
    lowered = {str(option).lower(): str(option) for option in options}
    close = difflib.get_close_matches(short(given).strip("'").lower(), lowered, n=1, cutoff=0.5)
    return lowered[close[0]] if close else None


def nearest(given: object, options: Sequence[object]) -> str:
    """The tail of a message about an invalid choice: `did you mean 'dense'? available: ...`.

    Among numbers, the next ones above and below are near, the closer ratio first: 128 and 64 for
    100.
    """
    numbers = [option for option in options if isinstance(option, int)]
    if numbers:
        meant = _neighbours(given, sorted(numbers))
    else:
        meant = [f"'{found}'" for found in [closest(given, options)] if found]
    hint = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{hint}available: {', '.join(map(str, options))}"


def _neighbours(given: object, numbers: Sequence[int]) -> list[str]:
    """At most two of the numbers, the nearer one first; none if `given` is not a number."""
    text = given if isinstance(given, str) else short(given)
    if not re.fullmatch(r"[-+]?[0-9]{1,18}(\.[0-9]{0,18})?", text):
        return []
    number = float(text)
    if number in numbers:
        return [f"{number:g}, without quotes"]
    around = [*[n for n in numbers if n < number][-1:], *[n for n in numbers if n > number][:1]]
    if number < numbers[0]:
        return [str(n) for n in around]  # `number` may have no logarithm
    return [str(n) for n in sorted(around, key=lambda n: abs(math.log(n / number)))]


def short(value: object) -> str:
    """A value as an error message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int with too many digits, or nested too deeply
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def raise_problems(document: Document, problems: Iterable[Problem]) -> None:
    """Raise one PolicyError that lists all problems by line, including the reader's."""
    refused = {problem.path for problem in document.problems if problem.hides}
    listed = document.problems + [
        problem
        for problem in problems
        if not any(problem.path[:end] in refused for end in range(len(problem.path) + 1))
    ]
    if listed:
        listed.sort(key=lambda problem: _place_of_problem(problem, document) or Place(0, 0))
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
        _located(Problem(*_translate_one(details, model)), data)
        for details in found
        if details["type"] != "missing" or details["loc"] not in meant
    ]


def _located(problem: Problem, data: Any) -> Problem:
    """The problem at its place in the file, where one alternative may have no list around it."""
    outer = problem.path[:-1]
    for part in outer:
        data = data[part]
    return replace(problem, path=outer) if isinstance(data, str) else problem


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
    """The path in the file of pydantic's location, and the types that a value may have there. A
    location also names alternatives: the `kind` of a codec, a union's types."""
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
    fields = getattr(part, "model_fields", {})
    return {info.alias or name: info.annotation for name, info in fields.items()}


def _keys(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    return [*_fields(_follow(model, loc)[1][0])]


def _kind(codec: type[BaseModel]) -> str:
    return codec.model_fields["kind"].default


def _sentence(problem: Problem, document: Document) -> str:
    place = _place_of_problem(problem, document)
    where = document.source if place is None else f"{document.source}:{place}"
    return ": ".join(part for part in (where, _key(problem.path), problem.text) if part)


def _place_of_problem(problem: Problem, document: Document) -> Place | None:
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

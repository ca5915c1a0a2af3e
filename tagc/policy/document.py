"""Reads a policy file and records the place of every key.

This file knows YAML; `tagc.policy.policy` knows what a policy may contain.
"""

import importlib.resources
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from tagc.basics.files import read_regular
from tagc.policy.suggest import REMOVED_POLICIES, nearest, short

Keys = tuple[str | int, ...]

_LARGEST = 1_000_000  # bytes of a policy file

DICT = "<dict>"
"""Source of a policy that is not from a file."""


class PolicyError(ValueError):
    """A policy that cannot be used. One line per problem: `file:line:column: key.path: what is
    wrong`."""


class Place(NamedTuple):
    """A line and a column of a file, both counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """A problem at a path. `place` is given if it differs from the place of the path's key."""

    path: Keys
    text: str
    place: Place | None = None


@dataclass(kw_only=True)
class Document:
    """Plain data, with its place in the file.

    Attributes:
        text: the content of the file.
        path: the file's real path, None for a built-in policy.
        places: the place of each key and list item, by path; empty for data not from a file.
        problems: what the reader refused.
        refused: the paths of the values that it left out for that reason.
    """

    source: str
    data: object
    text: str = ""
    path: str | None = None
    places: dict[Keys, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: list[Keys] = field(default_factory=list)


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
    """The document of a built-in policy. Raises PolicyError for an unknown name."""
    names = builtin_names()
    if name in REMOVED_POLICIES:
        raise PolicyError(f"the built-in policy {name!r} was removed: {REMOVED_POLICIES[name]}")
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
    document.problems.append(Problem(path, what))
    document.refused.append(path)
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

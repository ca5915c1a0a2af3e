"""Reading a policy file, with the line of every key, and saying what is wrong with it.

Knows YAML and error messages; what a policy may contain is `tagc.policy`'s business.
"""

import difflib
import importlib.resources
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

__all__ = [
    "Document",
    "PolicyError",
    "builtin_names",
    "parse",
    "raise_problems",
    "read_builtin",
    "read_file",
    "short",
    "translate",
]

Keys = tuple[str | int, ...]


class PolicyError(ValueError):
    """A policy that cannot be used. One line per problem: `file:line: key.path: what is wrong`."""


@dataclass(frozen=True)
class Problem:
    """What is wrong at a path; `line` where it is not the line of the path's key."""

    path: Keys
    text: str
    line: int | None = None


@dataclass(kw_only=True)
class Document:
    """Plain data as read, and where it stood.

    `lines` maps the path of each key and list item to its line, counted from 1; it is empty for
    data that came from no file. `problems` holds what the reader could not accept, `refused` the
    paths whose values it left out because of that.
    """

    source: str
    data: object
    lines: dict[Keys, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: list[Keys] = field(default_factory=list)


def builtin_names() -> list[str]:
    """The names of the policies that the package ships, sorted."""
    files = importlib.resources.files("tagc.policies").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_builtin(name: str) -> Document:
    """The document of a built-in policy. Raises PolicyError for an unknown name."""
    names = builtin_names()
    if name not in names:
        raise PolicyError(f"no built-in policy {name!r}; {_nearest(name, names)}")
    file = importlib.resources.files("tagc.policies") / f"{name}.yaml"
    return parse(file.read_bytes(), f"policies/{name}.yaml")


def read_file(path: str) -> Document:
    """The document in a file. Raises PolicyError as `parse` does, or if it cannot be read."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a null character in the path
        raise PolicyError(f"{path!r}: cannot be read: {error}") from None
    return parse(raw, path)


def parse(raw: bytes, source: str) -> Document:
    """Reads one YAML document in UTF-8.

    Scalars follow the core schema of YAML 1.2: `1e-3` is a number, `no` and `1:30` are strings.
    Duplicate keys, aliases and tags other than the core ones are collected as problems.

    Raises:
        PolicyError: the text is not UTF-8, not YAML, or empty.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{source}:{line}: not UTF-8 text ({error.reason})") from None
    document = Document(source=source, data=None)
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            document.data = _plain(root, (), document)
    # Besides its own errors PyYAML lets others through, such as chr()'s for an escape beyond
    # Unicode.
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        where = f"{source}:{_error_line(error, loader, text)}"
        raise PolicyError(f"{where}: invalid YAML: {_error_text(error)}") from None
    if root is None:
        raise PolicyError(f"{source}: the file is empty; a policy needs 'schema' and 'gradients'")
    return document


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
        listed.sort(key=lambda problem: _line_of(problem, document) or 0)
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
        (*details["loc"][:-1], _closest(details["loc"][-1], keys_at(details["loc"][:-1])))
        for details in found
        if details["type"] == "extra_forbidden"
    }
    return [
        Problem(*_translate_one(details, data, keys_at))
        for details in found
        if details["type"] != "missing" or details["loc"] not in meant
    ]


def _translate_one(
    details: ErrorDetails, data: object, keys_at: Callable[[Keys], Sequence[str]]
) -> tuple[Keys, str]:
    loc, kind, context = details["loc"], details["type"], details.get("ctx", {})
    path = _path_in(data, loc, missing=kind == "missing")
    given = short(details["input"])
    if kind == "missing":
        return path, "the key is missing"
    if kind == "extra_forbidden":
        return path, f"unknown key; {_nearest(loc[-1], keys_at(loc[:-1]))}"
    if kind == "union_tag_not_found":
        return (*path, "kind"), "the key is missing"
    if kind == "union_tag_invalid":
        tag = details["input"].get("kind")
        return (*path, "kind"), _unknown(tag, context["expected_tags"])
    if kind == "literal_error":
        return path, _unknown(details["input"], context["expected"])
    if kind in ("model_type", "model_attributes_type"):
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
    # Pydantic lists what it expects as text, each spelling in single quotes, numbers without.
    options = re.findall(r"'([^']*)'", expected) or re.findall(r"\d+", expected)
    return f"unknown value {short(given)}; {_nearest(given, options)}"


def _nearest(given: object, options: Sequence[str]) -> str:
    """The tail of a message about a misspelling: `did you mean 'dense'? available: ...`."""
    closest = _closest(given, options)
    hint = f"did you mean '{closest}'? " if closest else ""
    return f"{hint}available: {', '.join(options)}"


def _closest(given: object, options: Sequence[str]) -> str | None:
    lowered = {option.lower(): option for option in options}
    close = difflib.get_close_matches(short(given).strip("'").lower(), lowered, n=1, cutoff=0.5)
    return lowered[close[0]] if close else None


def _sentence(problem: Problem, document: Document) -> str:
    line = _line_of(problem, document)
    where = document.source if line is None else f"{document.source}:{line}"
    return ": ".join(part for part in (where, _spell(problem.path), problem.text) if part)


def _line_of(problem: Problem, document: Document) -> int | None:
    path = problem.path
    while path and path not in document.lines:
        path = path[:-1]
    return problem.line or document.lines.get(path)


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


def short(value: object) -> str:
    """A value as an error message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int with too many digits, or nested too deeply
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


_ALIAS = "alias"
_CORE = "tag:yaml.org,2002:"
_QUOTE = "quote a glob that starts with '*'"


class _Loader(yaml.SafeLoader):
    """Composes nodes only, and hands aliases on as marked scalars, so that they have a line."""

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
    document.lines.setdefault(path, node.start_mark.line + 1)
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
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _CORE + "str":
            document.problems.append(Problem(path, "a key is not a string", line))
            continue
        key = key_node.value
        here = (*path, key)
        if key in data:
            first = document.lines[here]
            document.problems.append(Problem(here, f"duplicate key, first on line {first}", line))
            continue
        document.lines[here] = line
        data[key] = _plain(value_node, here, document)
    return data


def _error_line(error: Exception, loader: _Loader | None, text: str) -> int:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return mark.line + 1
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1
    return loader.get_mark().line + 1 if loader else 1


def _error_text(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        what = ", ".join(part for part in (error.context, error.problem) if part)
        return f"{what}; {_QUOTE}" if "alias" in what else what
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character U+{error.character:04X} is not allowed"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split())

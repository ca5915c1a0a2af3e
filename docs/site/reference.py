"""The keys of a policy, as Markdown: ``python docs/site/reference.py`` prints them.

They are read from the model that checks policies (its JSON Schema), so that a key that is added
there appears here: its type, default and range as the model has them, and as its meaning the
string below the field.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from tagc.policy.policy import Extension
from tagc.policy.show import ABOUT

# What a part is called, where its name in the model says less. Other parts keep theirs.
_TITLES = {
    "Extension": "The file",
    "Rule": "A rule for gradients or replicas",
    "ParameterRule": "A rule for parameters",
    "When": "`when`",
    "FeedbackConfig": "`feedback`",
}
# Whose codecs they are, where several parts have codecs of the same name.
_OF = {"ParameterRule": " of parameters", "DimensionRule": " of dimensions"}
# A file has one of these keys or both, which fields cannot say.
_DEFAULTS = {"Extension.gradients": "this or `extends`", "Extension.extends": "none"}
_NO_LIMIT = 2**31 - 1  # what a count may be at most, for its own sake


def policy_reference(model: type[BaseModel] = Extension) -> str:
    """A section for every part of a policy, in the order in which a reader meets them.

    Args:
        model: what checks policy files.
    """
    schema = model.model_json_schema(by_alias=True)
    parts: dict[str, dict[str, Any]] = schema.pop("$defs")
    parts[model.__name__] = schema | {"description": ABOUT}
    titles = {model.__name__: _TITLES.get(model.__name__, model.__name__)}
    _walk(model.__name__, schema, parts, titles)
    lines: list[str] = []
    for name, title in titles.items():
        lines += _section(name, title, parts[name], titles)
    return "\n".join(lines)


def _walk(name: str, part: dict[str, Any], parts: dict[str, Any], titles: dict[str, str]) -> None:
    """Titles of all parts that are below this one."""
    found = []
    for key, field in part["properties"].items():
        for below in _parts_of(field):
            if below not in titles:
                kind = parts[below].get("properties", {}).get("kind", {}).get("const")
                of = _OF.get(name, "") if kind else ""
                titles[below] = _TITLES.get(below) or (
                    f"`codec: {{kind: {kind}}}`{of}" if kind and key == "codec" else f"`{key}`"
                )
                found.append(below)
    for below in found:
        _walk(below, parts[below], parts, titles)


def _parts_of(field: dict[str, Any]) -> list[str]:
    """The parts that a key's value may be, or a list or mapping of such."""
    found = [field["$ref"].rpartition("/")[2]] if "$ref" in field else []
    below = [*field.get("oneOf", ()), *field.get("anyOf", ()), *field.get("allOf", ())]
    for inner in (*below, field.get("items"), field.get("additionalProperties")):
        if isinstance(inner, dict):
            found += _parts_of(inner)
    return found


def _section(name: str, title: str, part: dict[str, Any], titles: dict[str, str]) -> list[str]:
    about = _plain(part.get("description", ""))
    required = part.get("required", ())
    lines = [f"## {title}", "", about, ""]
    if part.get("properties"):
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in part.get("properties", {}).items():
        default = "required" if key in required else _default(field)
        default = _DEFAULTS.get(f"{name}.{key}", default)
        if "const" in field and key == "kind":
            default = "required"  # it is what chooses this part
        meaning = _plain(field.get("description", ""))
        cells = (f"`{key}`", _value(field, titles), default, " ".join(meaning.split()))
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return [*lines, ""]


def _value(field: dict[str, Any], titles: dict[str, str]) -> str:
    """What a key's value may be."""
    if "$ref" in field:
        return _link(titles[field["$ref"].rpartition("/")[2]])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    options = [o for o in (*field.get("oneOf", ()), *field.get("anyOf", ())) if not _is_null(o)]
    if options:
        return ", ".join(_value(option, titles) for option in options)
    kind = field.get("type")
    if kind == "array":
        items = field.get("items") or next(iter(field.get("prefixItems", ())), {})
        pair = "maxItems" in field and field["maxItems"] == 2
        return ("two of: " if pair else "list of: ") + _value(items, titles)
    if kind == "object":
        values = field.get("additionalProperties")
        return "mapping to: " + _value(values, titles) if isinstance(values, dict) else "mapping"
    names = {"integer": "whole number", "boolean": "`true`, `false`", "string": "text"}
    return names.get(str(kind), str(kind or "any")) + _range(field)


def _is_null(field: dict[str, Any]) -> bool:
    return field.get("type") == "null"


def _range(field: dict[str, Any]) -> str:
    low, above = field.get("minimum"), field.get("exclusiveMinimum")
    high, below = field.get("maximum"), field.get("exclusiveMaximum")
    words = [
        f"at least {low}" if low is not None else "",
        f"above {above}" if above is not None else "",
        f"at most {high}" if high is not None and high < _NO_LIMIT else "",
        f"below {below}" if below is not None else "",
    ]
    return "".join(f", {word}" for word in words if word)


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value is None or value in ("", []):
        return "none"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _link(title: str) -> str:
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
    kind = re.match(r"`codec: \{kind: (\w+)\}`", title)
    return f"[`{kind[1]}`](#{anchor})" if kind else f"[{title}](#{anchor})"


def _plain(text: str) -> str:
    """A docstring with its roles and double backticks as Markdown spells them."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`").strip()


if __name__ == "__main__":
    print(policy_reference())

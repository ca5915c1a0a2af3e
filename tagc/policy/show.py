"""Shows a policy as one file with all of its rules; and the JSON Schema of policy files, which
editors use to complete and check them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema

from tagc.policy.document import DICT, read
from tagc.policy.policy import DIRECTIONS, Extension, Policy

ABOUT = "A policy of tagc: which gradients and parameters are sent compressed, and how."


def show(source: str | os.PathLike[str] | Mapping[str, Any]) -> str:
    """The text of a policy's file; if it extends others, a text with all rules.

    `Policy.load` gives the same policy for this text and for `source`.

    Raises:
        PolicyError: see `Policy.load`.
    """
    policy, document = Policy.load(source), read(source)
    data = document.data
    if document.text and isinstance(data, Mapping) and "extends" not in data:
        return document.text
    return "\n".join(_lines(policy)) + "\n"


def with_smaller(policy: Policy, direction: str, index: int, numel: int) -> str:
    """The text of a file that extends a policy, where a rule of it also selects parameters of
    ``numel`` elements; empty if the policy has no name to extend."""
    if policy.name == DICT:
        return ""
    rule = getattr(policy, direction)[index].model_dump(mode="json", exclude_unset=True)
    rule["when"]["min_numel"] = numel
    base = os.path.basename(policy.name)
    return f"schema: 1\nextends: {flow(base)}\n{direction}: [{flow(rule)}]"


def _lines(policy: Policy) -> Iterator[str]:
    bases = dict.fromkeys(o for d in DIRECTIONS for o in policy.origins(d))
    yield f"# {policy.name}, all in one file; rules are from {', '.join(bases)}."
    content = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for key, value in content.items():
        if key not in DIRECTIONS and value != {}:
            yield f"{key}: {flow(value)}"
    for direction in DIRECTIONS:
        rules = content.get(direction) or []
        if rules:
            yield f"{direction}:"
        last = None
        for rule, origin in zip(rules, policy.origins(direction), strict=True):
            if origin != last:
                yield f"  # {origin}"
            last = origin
            lines = [f"{key}: {flow(value)}" for key, value in rule.items()]
            yield from (("    " if i else "  - ") + line for i, line in enumerate(lines))


def flow(value: Any) -> str:
    """A value of a policy's file, in one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    # Quote what YAML could read as something other than text.
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        quoted = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=2**31)
        return quoted.rstrip("\n")
    return yaml.safe_dump(value, allow_unicode=True).removesuffix("...\n").rstrip("\n")


_PLAIN = re.compile(r"(?!(?:null|true|false)$)[a-z][a-z0-9_-]*")


class _Untitled(GenerateJsonSchema):
    """Omits the titles of keys, which would only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> str:
    """The JSON Schema (draft 7) of policy files, as text: descriptions, defaults and ranges of all
    keys; `x-unit` says what a number counts. `policies/policy.schema.json` holds the same.

    The schema does not check conditions across several keys; `Policy.load` checks everything.
    """
    # Editors support draft 7 best. Of what is used here, only the place of the definitions has
    # changed since.
    schema = Extension.model_json_schema(
        ref_template="#/definitions/{model}", schema_generator=_Untitled
    )
    definitions = schema.pop("$defs")
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **schema,
        "title": "tagc policy",
        "description": ABOUT,
        # A policy has its own rules, another's, or both.
        "required": ["schema"],
        "anyOf": [{"required": ["gradients"]}, {"required": ["extends"]}],
        "definitions": definitions,
    }
    _tidy(schema)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _tidy(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _tidy(item)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("description"), str):
        paragraphs = node["description"].split("\n\n")
        node["description"] = "\n\n".join(" ".join(p.split()) for p in paragraphs)
    # None means that the default depends on other keys.
    if "default" in node and node["default"] is None:
        del node["default"]
    for value in node.values():
        _tidy(value)

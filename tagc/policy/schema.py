"""The JSON Schema of policy files; editors use it to complete and check them."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from tagc.policy.policy import Extension

ABOUT = "A policy of tagc: which gradients and parameters are sent compressed, and how."


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

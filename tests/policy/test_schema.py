"""The JSON Schema of policy files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from tagc.policy import json_schema

SHIPPED = resources.files("tagc.policies")
SCHEMA = json.loads(json_schema())


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping that the schema describes: its name, and its keys."""
    yield "policy", SCHEMA["properties"]
    yield from ((name, found["properties"]) for name, found in SCHEMA["definitions"].items())


def alternatives(node: dict[str, Any]) -> list[dict[str, Any]]:
    """What a value may be."""
    if "$ref" in node:
        return alternatives(SCHEMA["definitions"][node["$ref"].rpartition("/")[2]])
    options = None if "type" in node else node.get("oneOf", node.get("anyOf"))
    return [node] if options is None else [one for o in options for one in alternatives(o)]


def test_the_shipped_file_is_what_the_model_says():
    """`tagc schema > policies/policy.schema.json` brings it up to date."""
    assert (SHIPPED / "policy.schema.json").read_text() == json_schema()


def test_no_other_key_is_allowed():
    for found in (SCHEMA, *SCHEMA["definitions"].values()):
        assert found["additionalProperties"] is False


def test_every_key_is_described_and_every_number_has_a_unit_and_bounds():
    for key, node in ((k, n) for _, properties in objects() for k, n in properties.items()):
        assert node.get("description", "").endswith("."), key
        assert "\n" not in node["description"], key
        numbers = [o for o in alternatives(node) if o.get("type") in ("integer", "number")]
        if numbers and key != "schema":
            assert '"x-unit"' in json.dumps(node), key
        # A number without a bound lets 1e300 pass, which overflows where it is used.
        for number in numbers:
            assert {"enum", "const"} & number.keys() or (
                {"minimum", "exclusiveMinimum"} & number.keys()
                and {"maximum", "exclusiveMaximum"} & number.keys()
            ), key

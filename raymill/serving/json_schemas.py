"""Prepares JSON schemas for llguidance, so that schemas of common SDKs work, and mean what they mean to OpenAI."""

import re
from typing import Any

SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames", "additionalItems")  # keywords with one schema
LISTS = ("anyOf", "oneOf", "prefixItems", "items")  # keywords with a list of schemas
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keywords with named schemas
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
ANY_NAME = {"type": "string"}
OPTIONS = {"x-guidance": {"whitespace_flexible": True, "coerce_one_of": True}}
"""llguidance's options, which replace those of the client. Like xgrammar, it takes `oneOf` for `anyOf`."""


def prepare(schema: Any) -> dict[str, Any]:
    """Return the schema for llguidance.

    - Objects have no more properties than the schema names, unless `additionalProperties` allows them, or a part of
      `allOf` or a required property has none.
    - A `pattern` with look-around, which llguidance does not support, is left out if a `format` says the same. zod
      writes both for email addresses.
    - `propertyNames` that allows any name is left out. zod writes it for records.

    Raises:
        ValueError: the schema is not a JSON object.
    """
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    return _prepare(schema, closed=True) | OPTIONS


def _prepare(schema: Any, closed: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for name in SCHEMAS:
        if isinstance(schema.get(name), dict):
            changed[name] = _prepare(schema[name], True)
    for name in LISTS:
        if isinstance(schema.get(name), list):
            changed[name] = [_prepare(each, closed or name in SCHEMAS) for each in schema[name]]
    if isinstance(schema.get("allOf"), list):
        changed["allOf"] = [_prepare(each, False) for each in schema["allOf"]]
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            changed[name] = {key: _prepare(each, True) for key, each in schema[name].items()}
    if closed and "allOf" not in schema and _has_all_required(schema):
        changed.setdefault("additionalProperties", False)
    if "format" in schema and isinstance(pattern := schema.get("pattern"), str) and LOOK_AROUND.search(pattern):
        del changed["pattern"]
    if schema.get("propertyNames") == ANY_NAME:
        del changed["propertyNames"]
    return changed


def _has_all_required(schema: dict[str, Any]) -> bool:
    """Return whether a schema names properties, and each required one."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return "patternProperties" in schema
    return all(name in properties for name in required if isinstance(name, str)) or "patternProperties" in schema

"""Makes FastAPI's validation of requests stop at the first error of each list, and puts one error into words."""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import SchemaValidator

from raymill.serving.body_checks import MAX_PATH_SHOWN
from raymill.serving.errors import ApiError

LISTS = {"list", "tuple", "set", "frozenset"}


def stop_at_first_errors(app: FastAPI) -> None:
    """Let each list in a request report only its first invalid item.

    Each item of `input` is compared with 30 types, so 30 kB of invalid ones would make half a million errors in 2 GB.

    Relies on `_type_adapter` of fastapi._compat.v2.ModelField, whose `validator` checks a body (FastAPI 0.136).
    """
    for route in app.routes:
        if isinstance(route, APIRoute):
            for field in route.dependant.body_params:
                adapter = field._type_adapter
                adapter.validator = SchemaValidator(_with_fail_fast(adapter.core_schema), _use_prebuilt=False)


def _with_fail_fast(schema: Any) -> Any:
    """Return a copy of pydantic's schema in which lists stop at their first error."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_fail_fast, schema))
    if not isinstance(schema, dict):
        return schema
    changed = {name: _with_fail_fast(value) for name, value in schema.items()}
    kind = changed.get("type")
    return changed | {"fail_fast": True} if isinstance(kind, str) and kind in LISTS else changed


def first_error(error: RequestValidationError) -> ApiError:
    """Return one error in words, without the input: the first of those that are deepest in the body.

    A value that fits no type of a union has an error for each type, and those of wrong types are less deep.
    """
    found = max(error.errors(), key=lambda each: len(_path(each, error.body)))
    cause = found.get("ctx", {}).get("error")
    param = getattr(cause, "parameter", None) or ".".join(map(str, _path(found, error.body))) or None  # vLLM names it
    is_unknown = found["type"] == "extra_forbidden"
    reason = "not supported; leave it out" if is_unknown else found["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{(param or 'the body')[:MAX_PATH_SHOWN]}: {reason}", param=param)


def _path(error: Any, body: Any) -> list[str | int]:
    """Return the place of an error in the body. pydantic adds names of types, which are not in the body."""
    path: list[str | int] = []
    _, *places = error["loc"]  # the first is `body`
    for place in places:
        try:
            body = body[place]
        except (LookupError, TypeError):
            if error["type"] != "missing" or place is not places[-1]:
                continue
        path.append(place)
    return path

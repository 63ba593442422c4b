"""Names of vLLM's arguments and parsers, stored in vllm_arguments.json so that settings are checked without vLLM.

python -m raymill.serving.vllm_arguments    writes the file for the installed vLLM
"""

import builtins
import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_suffix(".json")
ANY = "any"
SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}
MATCHES = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list | tuple),
    "table": lambda value: isinstance(value, dict),
    ANY: lambda value: True,
}
"""Whether a value in settings.toml has a type."""


class Arguments(NamedTuple):
    """Names of arguments and parsers. A value such as `int | 'auto'` says what an argument takes."""

    engine: dict[str, str]
    """Arguments of vLLM's engine."""
    frontend: dict[str, str]
    """Arguments of its HTTP API."""
    tool_parsers: list[str]
    reasoning_parsers: list[str]


@cache
def stored() -> Arguments:
    """Return the names in the file."""
    return Arguments(**json.loads(FILE.read_text(encoding="utf-8")))


def installed() -> Arguments:
    """Return the names in the installed vLLM. The import takes 5 to 30 seconds."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return Arguments(
        _takes(AsyncEngineArgs),
        _takes(BaseFrontendArgs),
        sorted(ToolParserManager.list_registered()),
        sorted(ReasoningParserManager.list_registered()),
    )


def accepts(takes: str, value: Any) -> bool:
    """Return whether an argument that takes `takes` accepts a value."""
    return any(MATCHES[each](value) if each in MATCHES else each == repr(value) for each in takes.split(" | "))


class _Names(dict[str, Any]):
    """Names in annotations. vLLM imports some classes of tables only for type checkers."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, dict)


def _takes(arguments: type) -> dict[str, str]:
    fields = [field for field in dataclasses.fields(arguments) if not field.name.startswith("_")]
    names = _Names(vars(sys.modules[arguments.__module__]))
    return {field.name: _shown(set(_types(field.type, names))) for field in fields}


def _types(annotation: Any, names: _Names) -> Iterator[str]:
    """Yield the types that settings.toml can express."""
    if isinstance(annotation, str):
        annotation = eval(annotation, {}, names)
    origin = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _types(argument, names)
    elif origin is typing.Annotated:
        yield from _types(arguments[0], names)
    elif origin is typing.Literal:
        yield from map(repr, arguments)
    elif origin is Any:
        yield ANY
    elif origin in SCALARS:
        yield SCALARS[origin]
    elif isinstance(origin, type) and issubclass(origin, enum.Enum):
        yield from map(repr, origin.__members__)
    elif isinstance(origin, type) and issubclass(origin, list | tuple | set):
        yield "list"
    elif (isinstance(origin, type) and issubclass(origin, dict)) or dataclasses.is_dataclass(origin):
        yield "table"


def _shown(found: set[str]) -> str:
    if "str" in found:  # also takes the strings that vLLM lists
        found = {each for each in found if not each.startswith("'")}
    return " | ".join(sorted(found)) or ANY


if __name__ == "__main__":
    FILE.write_text(json.dumps(installed()._asdict(), indent=1) + "\n", encoding="utf-8")

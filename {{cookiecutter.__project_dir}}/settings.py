"""Reads settings.toml into typed sections, and says what is wrong with it by line and key."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

PROJECT = Path(__file__).resolve().parent
FILE = PROJECT / "settings.toml"
PROFILES = ("local", "cluster")
RENAMED = {"gang_patience_s": "zone_timeout_s", "beside": "add"}
"""New name of each key or option that an earlier version of this project had."""


class UserError(Exception):
    """Bad input, in one sentence for a person: what is wrong, where, and what to type next."""

    exit_code = 1
    """Exit code of a verb that fails with this error."""


class Section(BaseModel):
    """One typed section of settings.toml; an unknown key or a wrong type is refused.

    The docstring below a field is its help on the command line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


S = TypeVar("S", bound=Section)


def active_profile() -> str:
    """`local` or `cluster`: set by the verb that submits a job, `local` where nobody set it."""
    return os.environ.get("PROFILE", "local")


def load(section_type: type[S], *names: str, profile: str | None = None, file: Path = FILE) -> S:
    """The named sections, each overlaid by the profile's, as one object.

    Raises:
        UserError: the file is missing or broken, or a key is unknown or has a wrong value.
    """
    profile = profile or active_profile()
    tables = _tables(names, profile)
    document = _parse(file)
    merged: dict[str, Any] = {}
    for table in tables:
        merged |= _table(document, table)
    try:
        return section_type.model_validate(merged)
    except ValidationError as error:
        raise UserError(_first_error(error, tables, file)) from None


def resolve(path: str) -> str:
    """An absolute path or URI for `path`, which may be relative to the project's folder.

    A submitted job runs in an unpacked copy of the project. PROJECT_DIR names what `data/` and `runs/` are in for it:
    the original folder where both are on one machine, the project's bucket on AWS.
    """
    if "://" in path or os.path.isabs(path):
        return path
    return f"{os.environ.get('PROJECT_DIR', PROJECT)}/{path}"


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} is missing; restore it with: git checkout {file.name}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file.name} is not valid TOML: {error}; correct that line.") from None


def _tables(names: tuple[str, ...], profile: str) -> list[str]:
    """Dotted names of the tables to merge, weakest first."""
    if profile not in PROFILES:
        raise UserError(f"profile {profile!r} is unknown; use one of: {', '.join(PROFILES)}.")
    return [table for name in names for table in (name, f"{profile}.{name}")]


def _table(document: dict[str, Any], dotted: str) -> dict[str, Any]:
    for part in dotted.split("."):
        document = document.get(part, {})
    return document


def _first_error(error: ValidationError, tables: list[str], file: Path) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # two keys that do not go together, which the message names
        return f"{file.name}, [{tables[-1]}]: {message}."
    key = str(first["loc"][0])
    table, line = _find_line(file, tables, key)
    where = f"{file.name} line {line}, key {table}.{key}" if line else f"{file.name}, key {tables[-1]}.{key}"
    reason = message
    if first["type"] == "extra_forbidden":
        reason = f"this key is now {RENAMED[key]}" if key in RENAMED else "no such key"
    return f"{where}: {reason} (found {first['input']!r}); correct it and try again." if line else f"{where}: {reason}."


def _find_line(file: Path, tables: list[str], key: str) -> tuple[str, int]:
    """Table and line number of the assignment that won, or ("", 0) when the key is not in the file."""
    found, current = ("", 0), ""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if header := re.match(r"\s*\[([\w.]+)\]", line):
            current = header[1]
        elif current in tables and re.match(rf"\s*{re.escape(key)}\s*=", line):
            found = max(found, (current, number), key=lambda hit: tables.index(hit[0]) if hit[0] else -1)
    return found

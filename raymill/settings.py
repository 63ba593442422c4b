"""Reads settings.toml into typed sections. Errors name the key and, if it is in the file, its line."""

import difflib
import os
import shlex
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from raymill.errors import UserError
from raymill.job_context import JobContext

PROJECT = Path(__file__).absolute().parents[1]  # not resolved, because in the template's tests `raymill` is a link
FILE = PROJECT / "settings.toml"
PROFILES = ("local", "cluster")


def inv(words: str, *values: str) -> str:
    """Return the command `inv WORDS VALUES` for a message, so that it can be run as printed.

    It is for the target of the verb or job that runs. The values are quoted for a shell.
    """
    verb, _, rest = words.partition(" ")
    target = JobContext.current().inv_target or "local"
    parts = ("inv", verb, "" if target == "local" else f"--target {target}", rest, shlex.join(values))
    return " ".join(part for part in parts if part)


class Section(BaseModel):
    """A typed section of settings.toml. Unknown keys and wrong types are errors.

    The docstring below a field is its help text on the command line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    ALTERNATIVES: ClassVar[tuple[str, ...]] = ()
    """Keys of which a table or a command line that sets one unsets the others."""

    @classmethod
    def replaced_by(cls, given: Collection[str]) -> set[str]:
        """Return the keys that lose their values where the keys `given` are set."""
        alternatives = set(cls.ALTERNATIVES)
        return alternatives - set(given) if alternatives & set(given) else set()


S = TypeVar("S", bound=Section)


def active_profile() -> str:
    """Return `local` or `cluster`. The verb that submits a job sets PROFILE; the default is `local`."""
    return JobContext.current().profile or "local"


def load(section_type: type[S], *names: str, profile: str | None = None, file: Path | None = None) -> S:
    """Return the named sections as one object. Keys of the profile's sections override shared ones, also in tables.

    Each section overrides those before it. Of those, only the keys that the type has are used.

    Raises:
        UserError: the profile is unknown, the file is missing or invalid, or a key is missing, unknown or wrong.
    """
    profile, file = profile or active_profile(), file or FILE
    tables = _tables(names, profile)
    document = parse(file)
    merged: dict[str, Any] = {}
    for table in tables:
        values = _table(document, table)
        if table.rpartition(".")[2] != names[-1]:
            values = {key: value for key, value in values.items() if key in section_type.model_fields}
        replaced = section_type.replaced_by(values)
        merged = {key: value for key, value in merged.items() if key not in replaced} | _merged(merged, values)
    try:
        return section_type.model_validate(merged)
    except ValidationError as error:
        raise UserError(_first_error(error, section_type, tables, file)) from None


def parse(file: Path) -> dict[str, Any]:
    """Return the content of settings.toml. Raises `UserError` if the file is missing or not valid TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{file} is missing. Run: git checkout {file.name}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file.name} is not UTF-8: {error}. Save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file.name} is not valid TOML: {error}. Correct that line") from None


def line_of(file: Path, path: Sequence[str]) -> int:
    """Return the line of a table's first header or of a key in a valid file, or 0 if the file does not have it.

    This is the first line with which the file's beginning has it, so it does not depend on how the user writes it.
    """
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    start = 0
    for number in range(1, len(lines) + 1):
        start = start or number
        try:
            document = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:  # within a value of several lines
            continue
        if _has(document, path):
            return start
        start = 0
    return 0


def no_such_key(key: str, known: Iterable[str]) -> str:
    """Return a sentence that says that there is no such key, and which of the known ones is probably meant."""
    near = difflib.get_close_matches(key.lower(), known, 1)
    return f"no such key. Did you mean {near[0]}?" if near else "no such key."


def resolve(path: str) -> str:
    """Return an absolute path or URI for `path`, which may be relative to the project's folder.

    A submitted job runs in a copy of the project. PROJECT_DIR says where `data/` and `runs/` are: in the original
    folder on this machine, or in the project's bucket on AWS.
    """
    if "://" in path or os.path.isabs(path):
        return path
    return f"{JobContext.current().project_dir or PROJECT}/{path}"


def _tables(names: tuple[str, ...], profile: str) -> list[str]:
    """Return the dotted names of the tables to merge. Later tables override earlier ones."""
    if profile not in PROFILES:
        raise UserError(f"unknown profile {profile!r}. Use one of: {', '.join(PROFILES)}")
    return [table for name in names for table in (name, f"{profile}.{name}")]


def _table(document: dict[str, Any], dotted: str) -> dict[str, Any]:
    for part in dotted.split("."):
        document = document.get(part, {})
    return document


def _merged(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides. A table in them is merged with the table of the same key in `values`."""
    return {
        key: values[key] | value if isinstance(value, dict) and isinstance(values.get(key), dict) else value
        for key, value in overrides.items()
    }


def _has(document: Any, path: Sequence[str]) -> bool:
    for part in path:
        document = document[-1] if isinstance(document, list) and document else document  # the last of [[tables]]
        if not isinstance(document, dict) or part not in document:
            return False
        document = document[part]
    return True


def _first_error(error: ValidationError, section_type: type[Section], tables: list[str], file: Path) -> str:
    # a misspelled key comes first: it explains why another one is missing
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # an error in the combination of several keys, which the message names
        return f"{file.name}, [{tables[-1]}]: {message}"
    key = str(first["loc"][0])
    table, line = _find_line(file, tables, key)
    where = f"{file.name} line {line}, key {table}.{key}" if line else f"{file.name}, key {tables[-1]}.{key}"
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return f"{where}: {no_such_key(key, section_type.model_fields)} Correct that line"
    if first["type"] == "missing" and not line:
        return f"{file.name}: the key {key} is missing. Add it to {' or '.join(f'[{table}]' for table in tables)}"
    return f"{where}: {message} (found {first['input']!r}). Correct that line" if line else f"{where}: {message}"


def _find_line(file: Path, tables: list[str], key: str) -> tuple[str, int]:
    """Return the table and line of the assignment that takes effect, or ("", 0) if the key is not in the file."""
    lines = ((table, line_of(file, [*table.split("."), key])) for table in reversed(tables))
    return next(((table, line) for table, line in lines if line), ("", 0))

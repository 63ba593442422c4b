"""All sections of settings.toml, and the check that the file has no others, because nothing would read them.

Every verb and every job runs the check. It reads the classes in the source code instead of importing their modules,
because some of these imports take seconds.
"""

import ast
import difflib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from raymill import settings
from raymill.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One section, written as the call of `settings.load` or `Job` that reads it."""

    type: str
    """Full name of the class whose fields are the section's keys."""
    names: tuple[str, ...]
    """The section, after those that it overrides."""
    profiles: tuple[str, ...] = settings.PROFILES
    """Profiles in which the section is read."""

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables in which you can write the section, the usual one first."""
        in_profiles = tuple(f"{profile}.{self.name}" for profile in self.profiles)
        return (self.name, *in_profiles) if self.profiles == settings.PROFILES else (*in_profiles, self.name)

    def load_type(self) -> type[settings.Section]:
        """Import the class."""
        module, _, name = self.type.rpartition(".")
        return getattr(importlib.import_module(module), name)


SECTIONS = (
    Entry("raymill.submission.LocalRaySection", ("ray",), ("local",)),
    Entry("raymill.submission.UploadSection", ("ray",), ("cluster",)),
    Entry("raymill.submission.SecretsSection", ("secrets",)),
    Entry("raymill.common.limits.LimitsSection", ("limits",), ("cluster",)),
    Entry("raymill.aws.stack_sections.BudgetSection", ("budget",), ("cluster",)),
    Entry("raymill.common.bucket.StorageSection", ("storage",), ("cluster",)),
    Entry("raymill.ray_support.aws_sections.NetworkSection", ("network",), ("cluster",)),
    Entry("raymill.aws.stack_sections.IamSection", ("iam",), ("cluster",)),
    Entry("raymill.ray_support.aws_sections.CapacitySection", ("capacity",), ("cluster",)),
    Entry("raymill.ray_support.aws_sections.GpuSection", ("gpu",), ("cluster",)),
    Entry("raymill.data.options.PreprocessOptions", ("preprocess",)),
    Entry("raymill.training.options.DDPOptions", ("train",)),
    Entry("raymill.training.options.FSDPOptions", ("train", "fsdp")),
    Entry("raymill.training.options.DeepSpeedOptions", ("train", "deepspeed")),
    Entry("raymill.training.options.ClassifierOptions", ("train", "classifier")),
    Entry("raymill.training.options.HFOptions", ("train", "hf")),
    Entry("raymill.training.options.NetworkOptions", ("train", "check_network")),
    Entry("raymill.tuning.options.TuneOptions", ("train", "tune")),
    Entry("raymill.evaluation.options.EvaluateOptions", ("evaluate",)),
    Entry("raymill.quantization.options.QuantizeOptions", ("quantize",)),
    Entry("raymill.generation.options.GenerateOptions", ("generate",)),
    Entry("raymill.serving.options.ServeOptions", ("serve",)),
    Entry("raymill.rag.options.EmbedOptions", ("embed",)),
    Entry("raymill.rag.options.RagOptions", ("rag",)),
    Entry("raymill.rag.options.EvaluateRagOptions", ("evaluate_rag",)),
)
"""The library's sections. A job of your own declares its section with its `Job`."""

Keypath = tuple[str, ...]
"""The parts of a dotted name, such as ("cluster", "limits", "hours")."""
Keys = dict[str, "Keys | None"]
"""The keys of a table. None: the value is not a table. An empty dict: it is a table with any keys."""


def check(file: Path | None = None) -> None:
    """Check that each table and each key of settings.toml is in SECTIONS.

    Raises:
        UserError: the first one that is not, with the nearest that is.
    """
    file = file or settings.FILE

    def place(path: Keypath) -> str:
        line = settings.line_of(file, path)
        return f"{file.name} line {line}" if line else file.name

    document = settings.parse(file)
    if not any(problems(document, place, SECTIONS)):
        return
    # only now, because it parses all scripts, and a script that is just being edited must not stop a verb
    for problem in problems(document, place, all_entries()):
        raise UserError(problem)


def all_entries() -> tuple[Entry, ...]:
    """Return SECTIONS, and the sections that only scripts in jobs/ declare, with their `Job`.

    Raises:
        UserError: a script is not valid Python.
    """
    scripts = sorted((settings.PROJECT / "jobs").glob("*.py"))
    return (*SECTIONS, *(entry for script in scripts for entry in declared_in(script.stem) if entry not in SECTIONS))


def declared_in(job: str) -> list[Entry]:
    """Return the section that a script in jobs/ reads, in a list, or an empty list if it reads none.

    Raises:
        UserError: the script is not valid Python.
    """
    module = f"jobs.{job}"
    classes, imported, body = _parsed(module)
    calls = [node.value for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    found = []
    for call in calls:
        if ast.unparse(call.func).rpartition(".")[2] == "Job" and len(call.args) > 1:
            kind, *names = map(ast.unparse, call.args)
            if not (full := _full_name(module, kind, classes, imported)):
                raise UserError(
                    f"{_file(module)} line {call.lineno}: the class {kind} is not in this file. Import it by its name"
                )
            found.append(Entry(full, tuple(map(ast.literal_eval, names))))
    return found


def problems(document: Mapping[str, Any], place: Callable[[Keypath], str], entries: tuple[Entry, ...]) -> Iterator[str]:
    """Yield a sentence for each table or key that is not in these entries. `place` says where in the file it is."""
    for path, value in _tables(document, entries):
        name = ".".join(path)
        readers = [entry for entry in entries if name in entry.tables]
        if not _is_table(value):
            homes = [f"to [{entry.tables[0]}]" for entry in entries if path[-1] in keys(entry.type)]
            home = (*homes, "below the header of one")[0]
            yield f"{place(path)}: the key {path[-1]} is in no section. Move it {home}"
        elif not readers:
            yield _unknown_table(place(path), path, entries)
        elif isinstance(value, list):
            yield f"{place(path)}: [[{name}]] is a list of tables. Write [{name}]"
        else:
            known = {key: kind for reader in readers for key, kind in keys(reader.type).items()}
            for inner, problem in _unknown_keys(path, value, known, entries):
                yield f"{place(inner)}, key {'.'.join(inner)}: {problem}"


def _tables(document: Mapping[str, Any], entries: tuple[Entry, ...]) -> Iterator[tuple[Keypath, Any]]:
    """Yield everything that stands where a section is expected: at the top, and in a profile, even a misspelled one."""
    sections = {entry.name for entry in entries}
    for name, value in document.items():
        has_only_tables = isinstance(value, dict) and bool(value) and all(_is_table(inner) for inner in value.values())
        if isinstance(value, dict) and (name in settings.PROFILES or (has_only_tables and name not in sections)):
            yield from (((name, inner), content) for inner, content in value.items())
        else:
            yield (name,), value


def _is_table(value: Any) -> bool:
    """Return whether the value is a table, or a list of tables."""
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _unknown_table(place: str, path: Keypath, entries: tuple[Entry, ...]) -> str:
    name = ".".join(path)
    usual = {table: entry.tables[0] if "." not in table else table for entry in entries for table in entry.tables}
    if path[0] in settings.PROFILES and path[-1] in usual:
        return f"{place}: [{name}] is never read. Write [{usual[path[-1]]}]"
    near = difflib.get_close_matches(name.lower(), usual, 1)
    guess = f" Did you mean [{usual[near[0]]}]?" if near else ""
    new = f'declare it in the script that reads it: JOB = Job(Options, "{path[-1]}")'
    return f"{place}: there is no section [{name}].{guess} Correct that line, or {new}"


def _unknown_keys(
    path: Keypath, table: Mapping[str, Any], known: Keys, entries: tuple[Entry, ...]
) -> Iterator[tuple[Keypath, str]]:
    for key, value in table.items():
        if key not in known:
            yield (*path, key), _unknown_key(path, key, known, entries)
        elif isinstance(value, dict) and known[key] is None:
            yield (*path, key), "this needs a value, not a table. Correct that line"
        elif isinstance(value, dict) and (nested := known[key]):
            yield from _unknown_keys((*path, key), value, nested, entries)


def _unknown_key(path: Keypath, key: str, known: Keys, entries: tuple[Entry, ...]) -> str:
    if key in settings.PROFILES:
        return f"no such key. Did you mean [{key}.{path[-1]}]? Correct that line"
    for entry in entries:
        if ".".join(path[:2]) not in entry.tables and key in keys(entry.type):
            same_profile = f"{path[0]}.{entry.name}"
            home = same_profile if same_profile in entry.tables else entry.tables[0]
            return f"no such key, but [{home}] has one. Move that line"
    return f"{settings.no_such_key(key, known)} Correct that line"


TABLES = ("dict", "Dict", "Mapping", "Any")
"""Names in the annotations of fields whose values may be tables with any keys."""


@functools.cache
def keys(class_name: str) -> Keys:
    """Return the keys of a subclass of `settings.Section`, given by its full name, without importing its module.

    Raises:
        UserError: the project has no such class.
    """
    module, _, name = class_name.rpartition(".")
    if not _file(module).exists() or name not in _parsed(module).classes:
        raise UserError(f"a section has the class {class_name}, but there is no such class. Correct its name")
    return _keys(module, name)


@functools.cache
def _keys(module: str, name: str) -> Keys:
    classes = _parsed(module).classes
    found: Keys = {}
    for base in classes[name].bases:
        found |= _keys_of(module, base) or {}
    for field in classes[name].body:
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.annotation).startswith("ClassVar"):
            continue
        if isinstance(field.target, ast.Name):
            found[field.target.id] = _nested(module, field.annotation)
    return found


def _nested(module: str, annotation: ast.expr) -> Keys | None:
    """Return the keys that a field's value may have, or None if it is not a table."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and (found := _keys_of(module, node)):
            return found
        if isinstance(node, ast.Name) and node.id in TABLES:
            return {}
    return None


def _keys_of(module: str, reference: ast.expr) -> Keys | None:
    """Return the keys of the class that an expression in a module names, or None if it is no class of the project."""
    classes, imported, _ = _parsed(module)
    owner, _, name = _full_name(module, ast.unparse(reference), classes, imported).rpartition(".")
    if not owner or not _file(owner).exists() or name not in _parsed(owner).classes:
        return None
    return _keys(owner, name)


def _full_name(module: str, name: str, classes: Mapping[str, ast.ClassDef], imported: Mapping[str, str]) -> str:
    """Return the full name of a class that a module calls `name`, or an empty string if the name is unknown."""
    first, dot, rest = name.partition(".")
    return f"{module}.{first}" if first in classes else f"{imported.get(first, '')}{dot}{rest}"


class _Module(NamedTuple):
    """What is defined at the top level of a module."""

    classes: dict[str, ast.ClassDef]
    imported: dict[str, str]
    """Full names of what it imports."""
    body: list[ast.stmt]


@functools.cache
def _parsed(module: str) -> _Module:
    """Return what a module of the project defines."""
    file = _file(module)
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        raise UserError(f"{file} line {error.lineno} is not valid Python: {error.msg}. Correct that line") from None
    imported = {}
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            imported |= {one.asname or one.name: f"{statement.module}.{one.name}" for one in statement.names}
        elif isinstance(statement, ast.Import):
            imported |= {one.asname or one.name: one.name for one in statement.names}
    classes = {statement.name: statement for statement in body if isinstance(statement, ast.ClassDef)}
    return _Module(classes, imported, body)


def _file(module: str) -> Path:
    return settings.PROJECT.joinpath(*module.split(".")).with_suffix(".py")

"""A job: a script in jobs/ with typed options, which override settings.toml, and one-line errors."""

import atexit
import contextlib
import difflib
import functools
import importlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import tyro
from pydantic import ValidationError
from tyro import _errors, constructors

from raymill import sections as all_sections
from raymill import settings
from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.printable import LogStream, printable
from raymill.ray_support import job_secrets
from raymill.ray_support.private.forks.client import hand_over
from raymill.serving import haproxy

PRIVATE_FOLDER = "RAY_PRIVATE_FOLDER"
"""Environment variable: folder for the Ray instance of this process. Other users cannot access the folder."""

Options = TypeVar("Options", bound=settings.Section)

OPTIONS = constructors.ConstructorRegistry()


class Job(Generic[Options]):
    """The job of a script. Make it before the script imports torch, Ray or transformers, and end the script with `run`.

    If the script is the program, this reads its options at once, so that --help and errors need no slow import.
    Without sections, the options come from the command line only.
    """

    def __init__(self, options_type: type[Options], *sections: str) -> None:
        self.options_type, self.sections = options_type, sections
        self._parsed: Options | None = None
        if sys._getframe(1).f_globals["__name__"] == "__main__":
            prepare_ray()
            self._parsed = parse(options_type, *sections)
            hand_over(sys.modules["__main__"])

    def load(self) -> Options:
        """Return the options from settings.toml."""
        return settings.load(self.options_type, *self.sections)

    def run(self, main: Callable[[Options], None]) -> None:
        """If the script is the program, call `main` with the options. A UserError ends it with a one-line error."""
        if self._parsed is not None:
            run(main, self._parsed)


def run(main: Callable[[Options], None], options: Options) -> None:
    """Call `main`. A UserError ends the process with a one-line error."""
    sys.stdout = LogStream(sys.stdout)  # jobs print names and texts of documents, rows, files and models
    job_secrets.load()  # some jobs read models from the hub before they connect
    try:
        main(options)
    except UserError as error:
        sys.exit(printable(f"error: {error}"))


def load(name: str) -> ModuleType:
    """Import a script of jobs/. That runs nothing: the script reads its options and runs only if it is the program.

    Raises:
        UserError: there is no such script.
    """
    if not (settings.PROJECT / "jobs" / f"{name}.py").is_file():
        raise UserError(f"there is no job {name!r}. Use the name of a file in jobs/, without .py.")
    return importlib.import_module(f"jobs.{name}")


def prepare_ray() -> None:
    """Set the variables that `import ray` and `import ray.serve` read, and make the folder of a private Ray."""
    # under `uv run`, Ray would also start its workers with `uv run`, in another environment
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return  # this process starts no Ray
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # keeps Ray on loopback; read once, by `import ray`
    if PRIVATE_FOLDER not in os.environ:  # workers inherit it
        parent = None if sys.platform == "linux" else "/tmp"  # macOS's TMPDIR is too long for socket paths
        private = tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("RAY_TMPDIR", parent))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        os.environ[PRIVATE_FOLDER] = private
    if "RAY_SERVE_ENABLE_HA_PROXY" not in os.environ:
        os.environ |= haproxy.variables(os.environ[PRIVATE_FOLDER])


def parse(options_type: type[Options], *sections: str) -> Options:
    """Return the settings of `sections`, overridden by the command line. Exit after --help, or with one-line errors."""
    printed = io.StringIO()
    try:
        all_sections.check()
        # a private API of tyro, whose version is pinned
        with_our_errors = _errors.on_parse_error(functools.partial(_refuse, options_type))
        with with_our_errors, contextlib.redirect_stdout(printed):
            options = tyro.cli(
                options_type,
                prog=_command(),
                description=(sys.modules["__main__"].__doc__ or "").partition("\n\n")[0],
                default=_defaults(options_type, *sections),
                registry=OPTIONS,
            )
    except UserError as error:
        sys.exit(printable(f"error: {error}"))
    except SystemExit:  # --help
        print(printed.getvalue().replace(" [-h]", "", 1), end="")
        raise
    if JobContext.current().job_options_checked_for:
        sys.exit()
    return options


def _defaults(options_type: type[Options], *sections: str) -> Options:
    """Return the settings of `sections`, without those that an option of the command line replaces."""
    defaults = settings.load(options_type, *sections)
    given = {word.partition("=")[0].strip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    unset = {name: options_type.model_fields[name].default for name in options_type.replaced_by(given)}
    return defaults.model_copy(update=unset)


def _command() -> str:
    """Return the command to show in messages, up to the options."""
    return JobContext.current().job_options_checked_for or f"python -m jobs.{Path(sys.argv[0]).stem}"


def _refuse(options_type: type[settings.Section], event: _errors.ParseErrorEvent) -> None:
    """Raise a UserError for a wrong command line, instead of showing tyro's error box."""
    if isinstance(event, _errors.UnrecognizedArgs):
        name = event.tokens[0].partition("=")[0].strip("-").replace("-", "_")
        near = difflib.get_close_matches(name, options_type.model_fields, 1)
        meant = f"; did you mean {_flag(near[0])}?" if near else "."
        raise UserError(f"unknown option {event.tokens[0]}{meant} List all options: {_command()} --help")
    if argument := getattr(event, "argument", None):
        takes = argument.lowered.metavar
        raise UserError(f"{argument.display_name()} expects {takes}. Details: {_command()} --help")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@OPTIONS.struct_rule
def _section(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
    """Tell tyro how to make a settings section from options, so that a bad value raises a UserError."""
    section_type = info.type
    if not (isinstance(section_type, type) and issubclass(section_type, settings.Section)):
        return None

    def make(**values: Any) -> settings.Section:
        try:
            return section_type(**values)
        except ValidationError as error:
            raise UserError(_first_error(error)) from None

    fields = tuple(
        constructors.StructFieldSpec(
            name, field.rebuild_annotation(), getattr(info.default, name), helptext=field.description
        )
        for name, field in section_type.model_fields.items()
    )
    return constructors.StructConstructorSpec(make, fields)


@OPTIONS.primitive_rule
def _table(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec | None:
    """Tell tyro to read a table with any keys as JSON."""
    if info.type_origin is not dict:
        return None
    return constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: json.loads(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # two options contradict each other; the message names them
        return message if message.endswith("?") else f"{message}."
    return f"{_flag(str(first['loc'][0]))}: {message} (found {first['input']!r}). Details: {_command()} --help"


def connect(*, log_to_driver: bool = True) -> None:
    """Join the cluster that the job was submitted to. Under plain `python -m`, start Ray on this machine instead.

    `log_to_driver` sets whether the job's log shows what its workers print.
    """
    prepare_ray()
    import ray  # imported late: it takes seconds, and a wrong option must fail before that

    from raymill.ray_support.private import core

    job_secrets.load()
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "local")  # by default, never join another user's cluster
    if address != "local":
        level: Any = os.environ.get("RAY_LOGGER_LEVEL", "info")  # a fork has imported Ray with another value
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=level)
        return
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # this machine is not preempted
    core.init(
        f"{os.environ[PRIVATE_FOLDER]}/ray",  # a subfolder, because Ray gives all users access to its temp folder
        address="local",
        include_dashboard=True,  # without a dashboard, Ray Train warns that it cannot see whether a run is alive
        logging_level=logging.WARNING,
        log_to_driver=log_to_driver,
        runtime_env={
            "worker_process_setup_hook": "raymill.ray_support.job_secrets.load",
            "env_vars": {"PYTHONPATH": str(settings.PROJECT)},  # so that workers can import the project
        },
    )

"""The entry of every job: typed options over settings.toml, and one-sentence errors."""

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro
from pydantic import ValidationError
from tyro import constructors

from jobs.serving import haproxy

# below `uv run`, Ray would start its workers with `uv run` too, in an environment of their own
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
if "RAY_ADDRESS" not in os.environ:  # read once, by `import ray`: a Ray of this process alone stays on loopback
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_SERVE_ENABLE_HA_PROXY" not in os.environ:
        sockets = tempfile.mkdtemp(prefix="serve-")  # which no other user enters
        os.environ |= haproxy.environment(sockets)
        atexit.register(shutil.rmtree, sockets, ignore_errors=True)
import ray

import settings
from jobs import secrets

Options = TypeVar("Options", bound=settings.Section)


OPTIONS = constructors.ConstructorRegistry()


def run(main: Callable[[Options], None], options_type: type[Options], *sections: str) -> None:
    """Parse the command line over the settings of `sections`, then call `main` with the options."""
    try:
        defaults = settings.load(options_type, *sections)
        options = tyro.cli(options_type, default=defaults, description=main.__doc__, registry=OPTIONS)
        main(options)
    except settings.Refusal as refusal:
        sys.exit(f"error: {refusal}")


@OPTIONS.struct_rule
def _section(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
    """How tyro makes a section from options: as it makes any model, but a bad value is one sentence, and no dump."""
    section_type = info.type
    if not (isinstance(section_type, type) and issubclass(section_type, settings.Section)):
        return None

    def make(**values: Any) -> settings.Section:
        try:
            return section_type(**values)
        except ValidationError as error:
            raise settings.Refusal(_first_error(error)) from None

    fields = tuple(
        constructors.StructFieldSpec(
            name, field.rebuild_annotation(), getattr(info.default, name), helptext=field.description
        )
        for name, field in section_type.model_fields.items()
    )
    return constructors.StructConstructorSpec(make, fields)


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # two options that do not go together, which the message names
        return f"{message}."
    option = "--" + str(first["loc"][0]).replace("_", "-")
    job = Path(sys.argv[0]).stem
    return f"{option}: {message} (found {first['input']!r}); what it takes: python -m jobs.{job} --help"


def connect(*, log_to_driver: bool = True) -> None:
    """Join the cluster that the job was submitted to, or start one in this process for `python -m`.

    `log_to_driver`: whether the job's log shows what its workers print.
    """
    secrets.load()
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "local")  # never a stranger's cluster that happens to run here
    if address != "local":
        ray.init(address=address, log_to_driver=log_to_driver)
        return
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody takes this machine away
    ray.init(
        address="local",
        include_dashboard=True,  # Ray Train asks it whether a run's controller lives, and complains without it
        logging_level=logging.WARNING,
        log_to_driver=log_to_driver,
        runtime_env={
            "worker_process_setup_hook": "jobs.secrets.load",
            "env_vars": {"PYTHONPATH": str(settings.PROJECT)},  # with `python -m`, Ray passes on jobs/ alone
        },
    )

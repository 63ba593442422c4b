"""The entry of every job: typed options over settings.toml, and one-sentence errors."""

import logging
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import tyro
from pydantic import ValidationError

# below `uv run`, Ray would start its workers with `uv run` too, in an environment of their own
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
if "RAY_ADDRESS" not in os.environ:  # read once, by `import ray`: a Ray of this process alone stays on loopback
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
import ray

import settings
from jobs import secrets

Options = TypeVar("Options", bound=settings.Section)


def run(main: Callable[[Options], None], options_type: type[Options], *sections: str) -> None:
    """Parse the command line over the settings of `sections`, then call `main` with the options."""
    try:
        defaults = settings.load(options_type, *sections)
        options = tyro.cli(options_type, default=defaults, description=main.__doc__)
        main(options)
    except settings.Refusal as refusal:
        sys.exit(f"error: {refusal}")
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # two options that do not go together, which the message names
            sys.exit(f"error: {message}.")
        option = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        sys.exit(f"error: {option}: {message} (found {first['input']!r}).")


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

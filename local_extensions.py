"""Jinja extensions for cookiecutter, in the file that cookiecutter's documentation recommends."""

import logging
import runpy
from pathlib import Path

from jinja2 import Environment
from jinja2.ext import Extension


class QuietHookErrors(Extension):
    """Suppress the traceback that cookiecutter 2.7 logs when a hook fails. The hook has already printed the error."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        logging.getLogger("cookiecutter.hooks").setLevel(logging.CRITICAL)


class InstanceTypes(Extension):
    """Gives templates the project's table of instance types.

    `instances` maps names to types, and `regions` is a list of names and regions.
    """

    TABLE = Path(__file__).parent / "{{cookiecutter.__project_dir}}" / "instance_types.py"

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        table = runpy.run_path(str(self.TABLE))["INSTANCE_TYPES"]
        environment.globals["instances"] = table
        environment.globals["regions"] = [(name, one.family.regions) for name, one in table.items()]

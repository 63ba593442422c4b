"""Jinja extensions for cookiecutter.

cruft generates the old and the new version of a project in one process, in which Python imports only one module of
each name. After a change that an older version would miss, rename this module.
"""

import json
import logging
import runpy
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.ext import Extension

TEMPLATE = Path(__file__).resolve().parent
INSTANCE_TYPES = TEMPLATE / "raymill" / "instance_types.py"


class QuietHookErrors(Extension):
    """Suppress the traceback that cookiecutter 2.7 logs when a hook fails. The hook has already printed the error."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        logging.getLogger("cookiecutter.hooks").setLevel(logging.CRITICAL)


class InstanceTypes(Extension):
    """Gives templates the project's table of instance types.

    `instances` maps names to types, and `regions` is a list of names and regions.
    """

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        table = runpy.run_path(str(INSTANCE_TYPES))["INSTANCE_TYPES"]
        regions = [(name, one.family.regions) for name, one in table.items()]
        variables: dict[str, Any] = environment.globals
        variables |= {"instances": table, "regions": regions}


class Template(Extension):
    """Tells hooks about the template: its folder, and the settings in its cookiecutter.json, such as versions."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        content = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
        settings = {name: value for name, value in content.items() if name.startswith("_") and name[1] != "_"}
        variables: dict[str, Any] = environment.globals
        variables |= {"template_folder": str(TEMPLATE), "template_settings": settings}

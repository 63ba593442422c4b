"""What the template adds to cookiecutter itself, in the file that cookiecutter's documentation proposes for it."""

import logging

from jinja2 import Environment
from jinja2.ext import Extension


class QuietRefusal(Extension):
    """cookiecutter 2.7 logs a traceback when a hook refuses; the hook has said in one sentence what is wrong."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        logging.getLogger("cookiecutter.hooks").setLevel(logging.CRITICAL)

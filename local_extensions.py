"""A Jinja extension for cookiecutter, in the file that cookiecutter's documentation recommends."""

import logging

from jinja2 import Environment
from jinja2.ext import Extension


class QuietHookErrors(Extension):
    """Suppress the traceback that cookiecutter 2.7 logs when a hook fails. The hook has already printed the error."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        logging.getLogger("cookiecutter.hooks").setLevel(logging.CRITICAL)

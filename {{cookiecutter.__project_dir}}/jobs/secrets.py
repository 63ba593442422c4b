"""Reads secrets by name in each process that needs them; values travel in no file, argv or metadata.

`SECRET_NAMES` (comma separated) and `SECRETS_FILE` (local target) are set by the verb that submits.
Ray calls `load` in every worker (`worker_process_setup_hook`); a driver calls it for itself.
"""

import os
from pathlib import Path

from dotenv import dotenv_values


def load() -> None:
    """Put the named secrets into this process's environment; a name without a value stays unset."""
    # not settings.PROJECT: every worker process runs this first, and would import pydantic for it
    file = Path(os.environ.get("SECRETS_FILE") or Path(__file__).parents[1] / ".env")
    values = dotenv_values(file) if file.is_file() else {}
    submitted = os.environ.get("SECRET_NAMES")  # plain `python -m` has no verb to name them: all that .env holds
    for name in submitted.split(",") if submitted else values:
        if value := values.get(name):
            os.environ.setdefault(name, value)

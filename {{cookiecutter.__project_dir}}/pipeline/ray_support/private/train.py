"""Ray Train: the log lines of its reports."""

import logging

from ray.train.v2._internal.execution import context


def quiet_reports() -> None:
    """Hide the lines that Ray Train logs in a worker for each report.

    Relies on ray.train.v2._internal.execution.context logging under its own `__file__`, which is why the level in
    LoggingConfig does not apply to it (Ray 2.60).
    """
    logging.getLogger(context.__file__).setLevel(logging.WARNING)

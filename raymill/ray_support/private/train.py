"""Ray Train: the log lines of its reports, and its list of checkpoints."""

import logging

from ray.train.v2._internal import constants
from ray.train.v2._internal.execution import context

LIST_OF_CHECKPOINTS = constants.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
"""Name of the file in a run's folder in which Ray Train lists the checkpoints (Ray 2.60)."""


def quiet_reports() -> None:
    """Hide the lines that Ray Train logs in a worker for each report.

    Relies on the logger of ray.train.v2._internal.execution.context, which is named after the module's `__file__`
    (Ray 2.60). Because of this name, the level in LoggingConfig does not apply to the logger.
    """
    logging.getLogger(context.__file__).setLevel(logging.WARNING)

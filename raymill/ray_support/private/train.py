"""Ray Train and Tune: the log lines of reports, the list of checkpoints, and whether this process runs a trial."""

import logging

from ray.train.v2._internal import constants
from ray.train.v2._internal.execution import context
from ray.tune.trainable.trainable_fn_utils import _in_tune_session

LIST_OF_CHECKPOINTS = constants.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
"""Name of the file in a run's folder in which Ray Train lists the checkpoints (Ray 2.60)."""


def quiet_reports() -> None:
    """Hide the lines that Ray Train logs in a worker for each report.

    Relies on the logger of ray.train.v2._internal.execution.context, which is named after the module's `__file__`
    (Ray 2.60). Because of this name, the level in LoggingConfig does not apply to the logger.
    """
    logging.getLogger(context.__file__).setLevel(logging.WARNING)


def is_in_trial() -> bool:
    """Return whether this process runs a trial.

    Relies on `_in_tune_session` of ray.tune.trainable.trainable_fn_utils (Ray 2.60).
    """
    return bool(_in_tune_session())

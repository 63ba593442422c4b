"""Keeps out of a job's log what Ray Train says by itself: the job's own lines say what happens."""

import logging
import os

from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.train.v2._internal.execution import context as reporting


def driver() -> None:
    """To be called once Ray is connected, some time before `fit`."""
    get_or_create_autoscaling_coordinator()  # it starts meanwhile; Ray Train would wait 5 s and then log a traceback
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # Ray Train's own print shows each line twice


def worker() -> None:
    """To be called in each worker."""
    # Ray names this logger by its file, so LoggingConfig's level does not reach it
    logging.getLogger(reporting.__file__).setLevel(logging.WARNING)

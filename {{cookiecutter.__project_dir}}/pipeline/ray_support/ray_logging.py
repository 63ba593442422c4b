"""Keeps out of a job's log what Ray Train says by itself: the job's own lines say what happens."""

import os

from pipeline.ray_support.private import data, train


def driver() -> None:
    """To be called once Ray is connected, some time before `fit`."""
    data.start_autoscaling_coordinator()  # it starts meanwhile; Ray Train would wait 5 s and then log a traceback
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # Ray Train's own print shows each line twice


def worker() -> None:
    """To be called in each worker."""
    train.quiet_reports()

"""Silences Ray Train, so that a job's log holds only the job's own lines."""

import os

from raymill.ray_support.private import data, train


def driver() -> None:
    """Silence the driver. Call this after connecting to Ray, well before `fit`."""
    data.start_autoscaling_coordinator()  # in the background; otherwise Ray Train waits 5 s and logs a traceback
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # Ray Train's replacement for `print` shows each line twice


def worker() -> None:
    """Silence this worker. Call this in each worker."""
    train.quiet_reports()

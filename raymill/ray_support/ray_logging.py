"""Silences Ray Train and Ray Data, because jobs print their own lines and progress."""

import logging
import os

from ray.data import DataContext

from raymill.ray_support.private import data, train


def driver() -> None:
    """Silence the driver. Call this after connecting to Ray, well before `fit`."""
    data.start_autoscaling_coordinator()  # in the background; otherwise Ray Train waits 5 s and logs a traceback
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # Ray Train's replacement for `print` shows each line twice


def worker() -> None:
    """Silence this worker. Call this in each worker."""
    train.quiet_reports()


def quiet_context() -> DataContext:
    """Return Ray Data's settings without progress bars, and send Ray Data's log only to its file.

    Errors still reach the console as exceptions.
    """
    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":
            handler.setLevel(logging.CRITICAL)
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True  # unwrapped, so that the job can explain the exception
    return context

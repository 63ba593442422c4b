"""Silences Ray Data's progress bars and logs, because the jobs print their own progress."""

import logging

from ray.data import DataContext


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

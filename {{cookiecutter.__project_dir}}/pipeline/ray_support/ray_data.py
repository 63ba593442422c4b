"""Ray Data as the jobs use it: what it does is shown by their own progress lines."""

import logging

from ray.data import DataContext


def quiet_context() -> DataContext:
    """Ray Data's settings without progress bars; its log is left to its file from now on.

    An error reaches the console as an exception, and once is enough.
    """
    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":
            handler.setLevel(logging.CRITICAL)
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True  # for whoever explains it; Ray would wrap it
    return context

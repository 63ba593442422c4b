"""Replaces `time.sleep` in one thread."""

import threading
import time
from collections.abc import Callable


def in_this_thread(instead: Callable[[float], None]) -> Callable[[float], None]:
    """Return a function that calls `instead` in this thread, and sleeps in the threads that other tests have left."""
    thread, sleep = threading.current_thread(), time.sleep
    return lambda seconds: (instead if threading.current_thread() is thread else sleep)(seconds)

"""Records how long a process imports. `starts` runs this file at the start of each Python process that it watches.

Each import statement that is not inside another one, and that takes 10 ms or more, becomes one line: when it ended, its
wall time and its CPU time, in seconds, and the name of the module. Imports only the standard library.
"""

import builtins
import json
import os
import threading
import time
from typing import Any

MIN_S = 0.01
_original, _current = builtins.__import__, threading.local()


def _import(name: str, *arguments: Any, **options: Any) -> Any:
    if getattr(_current, "is_importing", False):
        return _original(name, *arguments, **options)
    _current.is_importing = True
    wall, cpu = time.monotonic(), time.thread_time()
    try:
        return _original(name, *arguments, **options)
    finally:
        _current.is_importing = False
        if (took := time.monotonic() - wall) >= MIN_S:
            line = {"end": time.time(), "wall": took, "cpu": time.thread_time() - cpu, "name": name}
            with open(f"{os.environ['STARTS_FOLDER']}/{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")


if _original.__name__ != _import.__name__:  # Python may run a .pth file twice
    builtins.__import__ = _import

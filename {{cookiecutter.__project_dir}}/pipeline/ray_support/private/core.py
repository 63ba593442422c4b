"""Ray Core: starts Ray in a given folder."""

from typing import Any

import ray


def init(folder: str, **options: Any) -> None:
    """Call `ray.init` with `folder` for its sockets, logs and spilled objects.

    Relies on the parameter `_temp_dir` of `ray.init` (Ray 2.60).
    """
    ray.init(_temp_dir=folder, **options)
